"""The application over parts that never ran, in this process: what becomes of errors, bugs and clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest

from supervisor.daemon.daemon import Daemon
from supervisor.engine.events import Subscription
from supervisor.errors import UnavailableError
from supervisor.gateway.disconnect import ResponseBrokenError
from supervisor.gateway.route.routes import Routes
from tests.support.application import ORIGIN, ask, get
from tests.support.wire import post, talk, until

EVENTS, MODELS = b"/v1/admin/events", b"/v1/admin/models"


def fail_with(monkeypatch, error: Exception) -> None:
    """Have the list of models fail."""

    async def fail(_self):
        raise error

    monkeypatch.setattr(Daemon, "know_capabilities", fail)


def bugs(served) -> list[dict[str, object]]:
    return [event for event in served.logged if event["event"].startswith("http.")]


class TestErrors:
    """Whatever a route raises has one shape, and the same headers as every other answer."""

    async def test_of_a_route(self, served, monkeypatch):
        fail_with(monkeypatch, UnavailableError("Not now.", code="busy", retry_after_s=2.5))
        status, headers, body = await ask(served.port, get(MODELS, b"x-request-id: mine"))
        assert status == 503
        assert json.loads(body) == {
            "error": {"message": "Not now.", "type": "server_error", "param": None, "code": "busy"}
        }
        assert (headers["retry-after"], headers["content-type"]) == ("3", "application/json")
        assert headers["x-request-id"] == "mine"
        assert headers["openai-processing-ms"].isdecimal()
        assert not bugs(served)

    @pytest.mark.parametrize(
        ("path", "status"), [(b"/v1/nothing", 404), (b"/v1/models/none", 404), (b"/v1/models", 405)]
    )
    async def test_can_be_read_by_pages_of_allowed_origins(self, served, path, status):
        method = b"DELETE" if status == 405 else b"GET"
        told, headers, _ = await ask(served.port, get(path, b"Origin: " + ORIGIN.encode(), method=method))
        assert (told, headers["access-control-allow-origin"]) == (status, ORIGIN)

    async def test_have_anthropics_shape_on_its_paths(self, served):
        status, _, body = await ask(served.port, post(path=b"/v1/messages/nothing"))
        told = json.loads(body)
        assert (status, told["type"], told["error"]["type"]) == (404, "error", "not_found_error")

    async def test_of_an_unknown_path(self, served):
        status, headers, body = await ask(served.port, get(b"/nope"))
        assert (status, "allow" in headers) == (404, False)
        message = "There is nothing at GET /nope, and no configured model serves it."
        assert json.loads(body)["error"]["message"] == message

    async def test_of_another_method(self, served):
        status, headers, body = await ask(served.port, post(path=b"/health"))
        assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
        assert json.loads(body)["error"]["message"] == f"/health takes {headers['allow']}, not POST."

    async def test_of_another_method_where_models_are_asked(self, served):
        status, headers, body = await ask(served.port, get(b"/v1/chat/completions"))
        assert (status, headers["allow"]) == (405, "POST")
        assert json.loads(body)["error"]["message"] == "/v1/chat/completions takes POST, not GET."

    @pytest.mark.parametrize(
        "path", [b"/health/", b"/v1/models/", b"/health%0A", b"/metrics%0a", b"/%0a", b"/ui/%0A", b"/ui/index.html%0A"]
    )
    async def test_a_path_is_served_as_it_is_written(self, served, path):
        status, headers, body = await ask(served.port, get(path))
        assert (status, "location" in headers) == (404, False)
        assert json.loads(body)["error"]["type"] == "invalid_request_error"

    async def test_a_head_has_no_body(self, served):
        for path, status in ((b"/health", 200), (b"/nope", 404), (b"/ui/", 200), (b"/", 200)):
            told, headers, body = await ask(served.port, get(path, method=b"HEAD"))
            assert (told, body) == (status, b""), path
            assert "x-request-id" in headers


async def test_long_paths_are_not_remembered(served):
    """Anybody may send them, without a key."""
    for number in range(3):
        await ask(served.port, get(b"/nope/%d" % number + b"x" * 3000))
        await ask(served.port, get(b"/nope/%d" % number))
    kept = {path for _, _, path in served.application._path_infos}
    assert {"/nope/0", "/nope/1", "/nope/2"} <= kept
    assert max(map(len, kept)) < 300


class TestBugs:
    """A bug is logged once, with its traceback, and answered like every error if nothing was sent."""

    async def test_in_a_route(self, served, monkeypatch, caplog, capfd):
        fail_with(monkeypatch, ZeroDivisionError("a mistake of ours"))
        status, headers, body = await ask(served.port, get(MODELS))
        assert (status, headers["connection"]) == (500, "close")
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert b"mistake" not in body
        [event] = bugs(served)
        assert (event["event"], event["log_level"], event["exc_info"]) == ("http.application_failed", "error", True)
        assert ("GET", MODELS.decode(), headers["x-request-id"]) == (
            event["method"],
            event["path"],
            event["request_id"],
        )
        assert not caplog.records
        assert not any(capfd.readouterr())

    async def test_in_inference(self, served, monkeypatch):
        monkeypatch.setattr(Routes, "find", lambda *_: 1 / 0)
        status, headers, body = await ask(served.port, post(path=b"/v1/chat/completions"))
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        [event] = bugs(served)
        assert headers["x-request-id"] == event["request_id"]

    async def test_the_daemon_goes_on(self, served, monkeypatch):
        with monkeypatch.context() as patched:
            fail_with(patched, ZeroDivisionError())
            assert (await ask(served.port, get(MODELS)))[0] == 500
        assert (await ask(served.port, get(MODELS)))[0] == 200

    async def test_in_a_stream_breaks_it_off(self, served, monkeypatch):
        monkeypatch.setattr(Subscription, "next", lambda *_: 1 / 0)
        status, headers, body = await ask(served.port, get(EVENTS))
        assert (status, body) == (200, b"d\r\n: listening\n\n\r\n"), "no last chunk: not a clean end"
        [event] = bugs(served)
        assert (event["event"], event["request_id"]) == ("http.application_failed", headers["x-request-id"])

    async def test_the_log_has_the_path_as_it_was_written(self, served, monkeypatch):
        fail_with(monkeypatch, ZeroDivisionError())
        await ask(served.port, get(b"/v1/admin/%6dodels"))
        assert [event["path"] for event in bugs(served)] == ["/v1/admin/%6dodels"]


class TestOver:
    """What can't be told any more is neither a bug nor answered."""

    async def test_a_broken_response_is_cut(self, served, monkeypatch):
        fail_with(monkeypatch, ResponseBrokenError("it can't be completed"))
        assert await talk(served.port, get(MODELS)) == b""
        assert not bugs(served)

    async def test_a_broken_stream_is_cut(self, served, monkeypatch):
        async def broken(*_):
            raise ResponseBrokenError("it can't be completed")

        monkeypatch.setattr(Subscription, "next", broken)
        status, _, body = await ask(served.port, get(EVENTS))
        assert (status, body) == (200, b"d\r\n: listening\n\n\r\n")
        assert not bugs(served)

    async def test_a_client_that_leaves_with_its_body_half_sent(self, served):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/admin/models/plain/load HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        await until(lambda: served.running.state.tasks)
        writer.close()
        await until(lambda: not served.running.state.tasks)
        assert not bugs(served)

    async def test_a_listener_that_leaves(self, served):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(get(EVENTS))
        await reader.readuntil(b": listening\n\n")
        assert served.daemon.hub.wants("model")
        writer.close()
        await until(lambda: not served.running.state.tasks)
        assert not served.daemon.hub.wants("model")
        assert not bugs(served)
