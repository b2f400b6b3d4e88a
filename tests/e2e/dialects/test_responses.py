"""Responses of models whose workers only chat, through a real daemon."""

from __future__ import annotations

import json

import pytest

from tests.support.daemon import Daemon, fake
from tests.support.fake_worker import WORDS

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALLS = [
    {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome"}'}}]},
]


def scripted(**keys):
    """What the worker is to answer; the client can't say it through the translation."""
    return {"model": "fake", "force": {"fake": keys}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {
        "models": {
            "fake": fake(endpoints=[CHAT, "GET /stats"]),
            "text": fake(endpoints=[CHAT], modalities=["text"]),
            "counting": fake(endpoints=[CHAT, f"{CHAT}/input_tokens"]),
            "slow": fake("--start-delay=1", endpoints=[CHAT]),
            "broken": fake("--status=500", endpoints=[CHAT]),
            "dying": fake("--die-after=2", endpoints=[CHAT]),
            "speaks": fake(endpoints=[CHAT, "/v1/responses"]),
            "only": fake(endpoints=["/v1/responses"]),
        },
        "virtual_models": {
            "calling": scripted(deltas=CALLS, finish="tool_calls"),
            "thinking": scripted(message={"reasoning_content": "Hm", "content": "Hello"}),
            "long": {"model": "fake", "force": {"max_tokens": 400, "n": 3}},
            "limited": {"model": "speaks", "defaults": {"max_tokens": 9}},
            "limited-only": {"model": "only", "defaults": {"max_tokens": 9}},
            "cut": scripted(message={"content": "Hel"}, finish="length"),
            "failing": scripted(deltas=[{"content": "Hel"}, {"error": {"message": "out of luck", "code": 500}}]),
        },
        "limits": {"keepalive_s": 0.1},
    }
    daemon = Daemon(tmp_path_factory.mktemp("responses"), config)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def ask(site, model, given="Hi", **fields):
    return site.post("/v1/responses", json={"model": model, "input": given, **fields})


def count(site, model, **fields):
    return site.post("/v1/responses/input_tokens", json={"model": model, "input": "Hi", **fields})


def events(told):
    assert told.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: ")]


class TestAnswers:
    """Whole ones."""

    def test_a_text(self, site):
        told = ask(site, "fake", prompt_cache_key="k", tools=[{"type": "web_search"}])
        answer = told.json()
        assert (told.status_code, answer["object"], answer["model"], answer["status"]) == (
            200,
            "response",
            "fake",
            "completed",
        )
        assert answer["output"][0]["content"][0]["text"] == "".join(WORDS)
        assert answer["usage"]["total_tokens"] == 1 + len(WORDS)
        assert told.headers["x-llmux-ignored"] == "tools[web_search], prompt_cache_key"

    def test_thoughts(self, site):
        first, second = ask(site, "thinking").json()["output"]
        assert (first["content"][0]["text"], second["content"][0]["text"]) == ("Hm", "Hello")

    def test_one_that_was_cut_short(self, site):
        assert ask(site, "cut").json()["incomplete_details"] == {"reason": "max_output_tokens"}

    def test_without_a_version_in_the_path(self, site):
        assert site.post("/responses", json={"model": "fake", "input": "Hi"}).json()["object"] == "response"

    def test_a_worker_that_speaks_it_gets_the_request_as_it_is(self, site):
        assert ask(site, "speaks", store=True).status_code == 404, "which the scripted worker says"

    def test_a_configured_limit_has_another_name_there(self, site):
        assert ask(site, "limited").json()["status"] == "completed", "translated"
        assert ask(site, "limited-only").json()["error"]["message"] == "no such path", "it can't be"


class TestStreams:
    """Event by event."""

    def test_a_text(self, site):
        found = events(ask(site, "fake", stream=True))
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        said = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
        assert (said, found[-1]["type"]) == ([*WORDS], "response.completed")

    def test_a_call(self, site):
        last = events(ask(site, "calling", stream=True, tools=[TOOL]))[-1]["response"]
        (call,) = last["output"]
        assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "weather", '{"city": "Rome"}')
        assert last["usage"]["total_tokens"] == 13

    def test_while_the_model_loads(self, site):
        told = ask(site, "slow", stream=True)
        assert told.text.startswith(": keepalive\n\n")
        assert events(told)[0]["type"] == "response.created"

    def test_a_failure_of_the_worker(self, site):
        last = events(ask(site, "failing", stream=True))[-1]
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "out of luck")

    def test_one_that_breaks_off(self, site):
        found = events(ask(site, "dying", stream=True))
        assert (found[-1]["type"], found[-1]["sequence_number"]) == ("error", len(found) - 1)


class TestErrors:
    """In OpenAI's shape."""

    def test_a_refusal(self, site):
        told = ask(site, "fake", previous_response_id="resp_1")
        assert (told.status_code, told.json()["error"]["param"]) == (400, "previous_response_id")

    def test_a_reference(self, site):
        image = {"type": "input_image", "image_url": "http://127.0.0.1/secret.png"}
        told = ask(site, "fake", [{"role": "user", "content": [image]}])
        assert told.json()["error"]["code"] == "remote_media_refused"

    def test_a_picture_for_a_model_that_sees_none(self, site):
        image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        told = ask(site, "text", [{"role": "user", "content": [image]}])
        assert told.json()["error"]["code"] == "modality_unsupported"

    def test_of_the_worker(self, site):
        told = ask(site, "broken")
        assert (told.status_code, told.json()["error"]["message"]) == (500, "as told")


class TestCounts:
    """Of the tokens that a request has."""

    def test_come_from_workers_that_can_count(self, site):
        told = count(site, "counting").json()["error"]
        assert told["message"] == "no such path", "which the scripted worker says of the chat's path"

    def test_else_from_an_answer_of_one_token(self, site):
        asked = {"input": "Hi", "tools": [TOOL], "stream": True, "max_output_tokens": 500}
        told = count(site, "long", **asked)
        assert told.json() == {"object": "response.input_tokens", "input_tokens": 1}
        got = site.get("/stats?model=fake").json()["last"]
        assert (got["max_tokens"], got["messages"][0]["content"]) == (1, "Hi")
        assert got["tools"][0]["function"]["name"] == "weather"
        assert got.keys().isdisjoint({"stream", "n"})


def test_a_large_request_arrives_whole(site):
    """The scripted worker streams only if it can read the request."""
    image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 500_000}
    parts = [{"type": "input_text", "text": 'Say "a". ' * 10_000}, image, {"type": "input_text", "text": ": " * 1000}]
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": json.dumps({"city": "R" * 1000})}
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny, " * 1000}
    given = [{"role": "user", "content": parts}, call, result]
    tool = TOOL | {"description": "Tells it. " * 100}
    found = events(ask(site, "fake", given, stream=True, instructions="Be brief. " * 1000, tools=[tool]))
    assert (found[-1]["type"], found[-1]["response"]["instructions"]) == ("response.completed", None)
