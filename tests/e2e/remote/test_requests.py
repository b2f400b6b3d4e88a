"""Requests to a model that somebody else runs, through a real daemon to a real HTTPS server."""

from __future__ import annotations

import io
import json

import httpx
import pytest

from tests.e2e.remote.conftest import CLIENT_KEY, models_of
from tests.support.daemon import Daemon, running, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import AUDIO, KEY, MODEL, Reply, StandIn
from tests.support.limits import LIMIT_S

YES = {"allow_remote": True}


@pytest.fixture(scope="module")
def both(tmp_path_factory, authority, environment):
    """The remote, and a daemon that all tests here share."""
    with serving(StandIn(authority.context("localhost"))) as stand_in:
        folder = tmp_path_factory.mktemp("remote")
        with running(folder, {"models": models_of(stand_in, authority)}, env=environment) as daemon:
            yield stand_in, daemon


@pytest.fixture
def secure(both) -> StandIn:
    both[0].begin_anew()
    return both[0]


@pytest.fixture
def served(both, secure) -> Daemon:
    both[1].wait_state("far", "ready")
    return both[1]


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def said(text: str) -> str:
    deltas = [json.loads(event)["choices"][0]["delta"]["content"] for event in events(text) if event != "[DONE]"]
    return "".join(deltas)


class TestPasses:
    """Every kind of request goes through, with the name the model has there."""

    @pytest.mark.parametrize(
        ("path", "fields", "answer"),
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "chat.completion"),
            ("/v1/completions", {"prompt": "Hi"}, "text_completion"),
            ("/v1/responses", {"input": "Hi"}, "Hello from afar"),
            ("/v1/embeddings", {"input": "Hi"}, "0.25"),
            ("/v1/images/generations", {"prompt": "a cat"}, "aGVsbG8="),
        ],
    )
    def test_json(self, served, secure, path, fields, answer):
        response = served.post(path, json={"model": "far", **fields, **YES})
        assert response.status_code == 200, response.text
        assert answer in response.text
        (seen,) = secure.inference()
        assert seen.path == path.replace("/v1", "/api/v1")
        assert seen.json == {"model": MODEL, **fields}

    def test_counts_by_an_answer_of_one_token(self, served, secure):
        asked = {"model": "far", "messages": [{"role": "user", "content": "Hi"}]}
        assert served.post("/v1/messages/count_tokens", json=asked).status_code == 403, "it leaves this machine"
        assert served.post("/v1/messages/count_tokens", json=asked | YES).json() == {"input_tokens": 3}
        assert [(seen.path, seen.json) for seen in secure.inference()] == [
            ("/api/v1/chat/completions", asked | {"model": MODEL, "max_tokens": 1})
        ]

    @pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": {"prompt_tokens": 0}}])
    def test_counts_where_answers_do_not_tell(self, served, secure, usage):
        answer = {"choices": [{"message": {"content": "H"}}], **usage}
        secure.replies.append(Reply(body=json.dumps(answer).encode(), headers={"Content-Type": "application/json"}))
        told = served.post("/v1/responses/input_tokens", json={"model": "far", "input": "Hi", **YES})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "endpoint_not_supported")
        assert "usage" in told.json()["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_its_own_name_comes_back_as_the_asked_one(self, served, secure, stream):
        """A remote that answers by a more exact name keeps that."""
        name = f'{{"model": "{MODEL}", "choices": []}}'.encode()
        exact = f'{{"model": "{MODEL}-2026-01-01", "choices": [{{"finish_reason": "stop"}}]}}'.encode()
        body, kind = name + b"\n" + exact, "application/json"
        if stream:
            body, kind = b"data: " + name + b"\n\ndata: " + exact + b"\n\ndata: [DONE]\n\n", "text/event-stream"
        secure.replies.append(Reply(body=body, headers={"Content-Type": kind}))
        told = served.chat("far", stream=stream, **YES)
        assert told.content == body.replace(name, name.replace(MODEL.encode(), b"far"))
        assert b'"far"' in told.content

    def test_speech(self, served):
        response = served.post("/v1/audio/speech", json={"model": "far", "input": "Hi", "voice": "a", **YES})
        assert response.content == AUDIO
        assert response.headers["content-type"] == "audio/mpeg"

    @pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"])
    def test_forms(self, served, secure, path):
        file = bytes(range(256)) * 5000
        form = {"data": {"model": "far", "language": "de", "allow_remote": "true"}, "files": {"file": io.BytesIO(file)}}
        response = served.post(path, **form)
        assert response.status_code == 200, response.text
        (seen,) = secure.inference()
        assert file in seen.body
        assert b'name="model"\r\n\r\nprovider-large\r\n' in seen.body
        assert b'name="language"\r\n\r\nde\r\n' in seen.body
        assert b"far\r\n" not in seen.body
        assert b"allow_remote" not in seen.body

    def test_streams_as_it_comes(self, served, secure):
        secure.hold.clear()
        body = {"model": "far", "messages": [], "stream": True, **YES}
        with served.client().stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.iter_text()
            first = next(pieces)
            assert "Hello" in first  # while the remote still keeps the rest back
            assert "afar" not in first
            secure.hold.set()
            assert said(first + "".join(pieces)) == "Hello from afar"

    def test_tokens_are_counted(self, served):
        before = len(served.events("request.finished"))
        served.chat("far", **YES)
        (record,) = wait_until(lambda: served.events("request.finished")[before:])
        assert (record["prompt_tokens"], record["completion_tokens"]) == (3, 4)

    def test_other_paths_are_not_passed(self, served, secure):
        assert served.post("/v1/moderations", json={"model": "far", "input": "Hi", **YES}).status_code in {400, 404}
        assert secure.inference() == []


class TestPermission:
    """Nothing leaves the machine unasked."""

    def test_refused(self, served, secure):
        response = served.chat("far")
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "remote_not_allowed"
        assert response.json()["error"]["param"] == "allow_remote"
        assert "X-Allow-Remote" in response.json()["error"]["message"]
        assert secure.seen == []

    def test_refused_as_a_form(self, served, secure):
        response = served.post("/v1/audio/transcriptions", data={"model": "far"}, files={"file": b"x"})
        assert response.json()["error"]["code"] == "remote_not_allowed"
        assert secure.seen == []

    @pytest.mark.parametrize("value", [False, None])
    def test_saying_no_is_not_saying_yes(self, served, value):
        assert served.chat("far", allow_remote=value).status_code == 403

    @pytest.mark.parametrize("value", ["true", 1, {}])
    def test_other_values_are_mistakes(self, served, value):
        assert served.chat("far", allow_remote=value).status_code == 400

    def test_by_header(self, served, secure):
        body = {"model": "far", "messages": []}
        response = served.post("/v1/chat/completions", json=body, headers={"X-Allow-Remote": "true"})
        assert response.status_code == 200
        assert "x-allow-remote" not in secure.inference()[0].headers

    def test_by_configuration(self, served, secure):
        assert served.chat("open").status_code == 200
        assert secure.inference()[0].json["model"] == MODEL

    def test_a_local_model_never_hears_of_it(self, served):
        body = {"model": "near", "messages": [{"role": "user", "content": "Hi"}], **YES}
        echo = served.post("/v1/chat/completions", json=body, headers={"X-Allow-Remote": "true", "X-Other": "1"})
        assert echo.status_code == 200, echo.text


class TestIdentity:
    """The remote learns nothing of the client, and the client nothing of our account there."""

    def test_only_our_key_is_sent(self, served, secure):
        headers = {
            "Authorization": f"Bearer {CLIENT_KEY}",
            "Cookie": "session=clients",
            "X-Forwarded-For": "10.1.2.3",
            "X-Forwarded-User": "ann",
            "X-Tenant-ID": "team",
            "X-OpenWebUI-User-Email": "ann@example.org",
            "Proxy-Authorization": "Basic YTpi",
            "Referer": "https://internal.example.org/chat",
            "Traceparent": "00-1-1-00",
            "OpenAI-Beta": "assistants=v2",
        }
        body = {"model": "far", "messages": [], **YES}
        assert served.post("/v1/chat/completions?api_key=mine", json=body, headers=headers).status_code == 200
        (seen,) = secure.inference()
        assert seen.headers == {
            "host": secure.url.split("/")[2],
            "content-type": "application/json",
            "content-length": str(len(seen.body)),
            "accept": "*/*",
            "openai-beta": "assistants=v2",
            "user-agent": "llmux",
            "accept-encoding": "identity",
            "authorization": f"Bearer {KEY}",
        }
        assert seen.path == "/api/v1/chat/completions"

    def test_cookies_and_policies_of_the_remote_stay_there(self, served, secure):
        first = served.chat("far", **YES)
        for name in ("set-cookie", "strict-transport-security", "openai-organization", "server"):
            assert name not in first.headers
        assert first.headers["x-ratelimit-remaining-requests"] == "41"
        served.chat("far", **YES)
        assert "cookie" not in secure.inference()[1].headers


class TestErrors:
    """What goes wrong there is told here, in words that help."""

    def test_its_own_errors_pass(self, served, secure):
        secure.replies.append(Reply(400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'))
        response = served.chat("far", **YES)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"

    def test_a_refused_key_is_not_the_clients(self, served, secure, environment):
        secure.replies.append(Reply(401, b'{"error": {"message": "Incorrect API key provided"}}'))
        response = served.chat("far", **YES)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_auth_failed"
        assert "THEIR_API_KEY" in response.json()["error"]["message"]
        assert "www-authenticate" not in response.headers
        assert served.events("remote.key_refused")[-1]["variable"] == "THEIR_API_KEY"

    def test_a_key_that_is_repeated_is_masked(self, served, secure):
        secure.replies.append(Reply(400, json.dumps({"error": {"message": f"bad header Bearer {KEY}"}}).encode()))
        response = served.chat("far", **YES)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "bad header Bearer ***"

    def test_redirects_are_not_followed(self, served, secure):
        secure.replies.append(Reply(307, b"", {"Location": "https://elsewhere.example.com/v1/chat/completions"}))
        response = served.chat("far", **YES)
        assert response.status_code == 502
        assert "base_url" in response.json()["error"]["message"]
        assert "location" not in response.headers

    def test_a_stream_that_breaks_off_is_told_in_band(self, served, secure):
        event = b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
        secure.replies.append(Reply(body=event, headers={"Content-Type": "text/event-stream"}, breaks_off=True))
        body = {"model": "far", "messages": [], "stream": True, **YES}
        with served.client().stream("POST", "/v1/chat/completions", json=body) as response:
            received = b"".join(response.iter_raw())
        assert event in received
        assert b"upstream_broken" in received
        assert b"[DONE]" not in received
        assert len(secure.inference()) == 1

    def test_an_answer_that_breaks_off_does_not_end_cleanly(self, served, secure):
        secure.replies.append(Reply(body=b'{"choices": [', breaks_off=True))
        with pytest.raises(httpx.RemoteProtocolError):
            served.chat("far", **YES)
        assert len(secure.inference()) == 1

    def test_no_answer_at_all(self, served, secure):
        secure.replies.append(Reply(close_at_once=True))
        response = served.chat("far", **YES)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_error"
        assert len(secure.inference()) == 1

    def test_a_client_that_leaves_is_told_to_the_remote(self, served, secure):
        secure.hold.clear()
        body = {"model": "far", "messages": [], "stream": True, **YES}
        with served.client().stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_raw())
        assert secure.left.wait(LIMIT_S)
        wait_until(lambda: served.model("far")["in_flight"] == 0)
