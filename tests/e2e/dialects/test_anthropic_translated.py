"""`/v1/messages` of a model whose worker speaks only chat completions, through a real daemon."""

from __future__ import annotations

import json

import pytest

from tests.support.daemon import fake, running
from tests.support.fake_worker import WORDS

CHAT = "/v1/chat/completions"
CALLS = [
    {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
EXTENSION_FIELDS = {"reasoning_content": "Hm.", "content": "Yes.", "tool_calls": CALLS}
BROKEN = [{"content": "Yes"}, {"error": {"code": 500, "message": "no memory is left", "type": "server_error"}}]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {
        "models": {
            "plain": fake(endpoints=[CHAT]),
            "failing": fake("--status=503", endpoints=[CHAT]),
            "dying": fake("--die-after=2", endpoints=[CHAT]),
            "slow": fake("--start-delay=1", endpoints=[CHAT]),
            "words": fake(endpoints=["/v1/embeddings"]),
            "counting": fake(endpoints=["/v1/messages/count_tokens"]),
        },
        "virtual_models": {
            "caller": {
                "model": "plain",
                "force": {"fake": {"message": EXTENSION_FIELDS, "deltas": [EXTENSION_FIELDS], "finish": "tool_calls"}},
            },
            "broken": {"model": "plain", "force": {"fake": {"deltas": BROKEN}}},
        },
        "limits": {"keepalive_s": 0.1},
    }
    with running(tmp_path_factory.mktemp("messages"), config) as daemon:
        yield daemon


def ask(site, model, path="/v1/messages", **fields):
    body = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return site.post(path, json={name: value for name, value in body.items() if value is not None})


def events(told):
    """Names and data, without comments."""
    found = [event.split("\n") for event in told.text.split("\n\n") if event and not event.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


class TestAnswers:
    """What Anthropic's clients get."""

    def test_a_whole_one(self, site):
        told = ask(site, "plain", service_tier="auto")
        assert (told.status_code, told.headers["content-type"]) == (200, "application/json")
        assert told.headers["x-llmux-ignored"] == "service_tier"
        assert told.headers["request-id"]
        assert told.json() == {
            "id": "msg_fake",
            "type": "message",
            "role": "assistant",
            "model": "plain",
            "content": [{"type": "text", "text": "".join(WORDS)}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 1,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": len(WORDS),
            },
        }

    def test_thoughts_and_calls(self, site):
        told = ask(site, "caller").json()
        assert told["model"] == "caller"
        assert [block["type"] for block in told["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert told["content"][2] == {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
        assert told["stop_reason"] == "tool_use"

    def test_a_stream(self, site):
        told = ask(site, "plain", stream=True)
        assert told.headers["content-type"] == "text/event-stream"
        names = [name for name, _ in events(told)]
        deltas = ["content_block_delta"] * len(WORDS)
        assert names == [
            "message_start",
            "ping",
            "content_block_start",
            *deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert "".join(WORDS) == "".join(data["delta"]["text"] for name, data in events(told) if name in deltas)

    def test_a_stream_of_thoughts_and_calls_with_its_usage(self, site):
        told = events(ask(site, "caller", stream=True))
        blocks = [(data["index"], data["content_block"]["type"]) for _, data in told if "content_block" in data]
        assert blocks == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
        assert told[0][1]["message"]["model"] == "caller"
        assert told[-2][1]["delta"]["stop_reason"] == "tool_use"
        assert (told[-2][1]["usage"]["input_tokens"], told[-2][1]["usage"]["output_tokens"]) == (9, 4)

    def test_a_stream_that_waits_for_its_model(self, site):
        told = ask(site, "slow", stream=True)
        assert told.text.startswith(": keepalive\n\n")
        assert events(told)[-1] == ("message_stop", {"type": "message_stop"})


class TestErrors:
    """All in Anthropic's shape."""

    def test_of_the_request(self, site):
        told = ask(site, "plain", max_tokens=None)
        assert told.status_code == 400
        assert told.json()["error"]["type"] == "invalid_request_error"
        assert told.json()["error"]["param"] == "max_tokens"

    def test_a_picture_by_reference(self, site):
        source = {"type": "url", "url": "http://127.0.0.1:1/x.png"}
        turn = {"role": "user", "content": [{"type": "image", "source": source}]}
        assert ask(site, "plain", messages=[turn]).json()["error"]["code"] == "remote_media_refused"

    def test_of_the_worker(self, site):
        told = ask(site, "failing")
        assert told.status_code == 503
        assert (told.json()["type"], told.json()["error"]["type"]) == ("error", "overloaded_error")

    def test_of_the_worker_within_a_stream(self, site):
        *_, (before, _), (name, data) = events(ask(site, "broken", stream=True))
        assert (before, name) == ("content_block_delta", "error")
        assert (data["error"]["type"], data["error"]["message"]) == ("api_error", "no memory is left")

    def test_of_a_stream_that_breaks_off(self, site):
        *_, (before, _), (name, data) = events(ask(site, "dying", stream=True))
        assert (before, name) == ("content_block_delta", "error")
        assert data["error"]["type"] == "api_error"

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
    def test_a_model_that_serves_neither(self, site, path):
        told = ask(site, "words", path)
        assert told.status_code == 400
        assert told.json()["error"]["code"] == "endpoint_not_supported"


def test_a_count_that_the_worker_has_not(site):
    """By an answer of one token."""
    told = ask(site, "plain", "/v1/messages/count_tokens", max_tokens=None, system="Be brief.")
    assert (told.status_code, told.json()) == (200, {"input_tokens": 1})


class TestThinking:
    """It reaches only what knows such a switch; for others, clients that always ask for it are served all the same."""

    def test_of_a_model_that_has_no_switch(self, site):
        told = ask(site, "plain", thinking={"type": "disabled"})
        assert (told.status_code, told.headers["x-llmux-ignored"]) == (200, "thinking")


class TestModels:
    """The list of Anthropic's clients."""

    def test_has_every_chat_model(self, site):
        told = site.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        names = {row["id"] for row in told["data"]}
        assert names == {"failing", "dying", "slow", "caller", "broken"}  # virtual models stand for their own

    @pytest.mark.parametrize(("name", "status"), [("caller", 200), ("words", 404)])
    def test_has_entries_of_its_own(self, site, name, status):
        told = site.get(f"/v1/models/{name}", headers={"anthropic-version": "2023-06-01"})
        assert (told.status_code, told.json()["type"]) == (status, "model" if status == 200 else "error")
