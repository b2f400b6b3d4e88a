"""Paths that a model's entry lists: exact ones, patterns, WebSockets; and requests that only look."""

from __future__ import annotations

import json
import time

import pytest

from tests.support import raw
from tests.support.daemon import fake, running, wait_until
from tests.support.websocket import CLOSE, TEXT, WebSocket

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    files = ["GET /files/a%2Fb.json", "GET /files/{name}/x", "GET /files/deep/*"]
    endpoints = [CHAT, "GET /ws", "GET /stats", *files]
    config = {
        "models": {
            "a": fake(endpoints=endpoints, loads=True, vram_mib=800),
            "b": fake(endpoints=[CHAT, "GET /stats", "GET /files/*"], vram_mib=800),
            "c": fake(endpoints=[CHAT], vram_mib=800),
        },
        "devices": [{"kind": "host", "budget_mib": 1000, "margin_mib": 0}],
    }
    with running(tmp_path_factory.mktemp("paths"), config) as daemon:
        yield daemon


class TestPaths:
    """What was sent is what the worker gets."""

    @pytest.mark.parametrize(
        "path",
        [
            "/files/a%2Fb.json?x=1&model=a",
            "/files/one/x?model=a",
            "/files/a%2Fb/x?model=a",
            "/files/deep/er/and%20deeper?model=a",
            "/files/deep/?model=a",
            "/files/deep/one?model=b",
        ],
    )
    def test_as_it_came(self, site, path):
        assert site.get(path).json() == {"path": path, "model": path[-1]}

    @pytest.mark.parametrize(
        "path",
        [
            "/files/deep/../secret?model=a",
            "/files/deep/%2e%2e/secret?model=a",
            "/files/deep/a%2F..%2F..%2Fsecret?model=a",
            "/files?model=a",
        ],
    )
    def test_what_fits_none(self, site, path):
        assert raw.request(site, f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{site.port}").status == 404

    def test_what_another_model_has(self, site):
        assert site.get("/files/one/two/x?model=a").json()["error"]["code"] == "endpoint_not_supported"

    def test_the_log_has_the_pattern(self, site):
        mine = site.get("/files/deep/one?model=a").headers["x-request-id"]
        (found,) = wait_until(lambda: [each for each in site.events("request.finished") if each["request_id"] == mine])
        assert found["path"] == "/files/deep/*"

    @pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "///v1//models/a"])
    def test_slashes_of_a_base_url(self, site, path):
        assert raw.request(site, f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{site.port}").status == 200

    @pytest.mark.parametrize("path", ["/v1/responses/x%0Ay", "/v1/responses/x%0A"])
    def test_a_line_break_in_a_name(self, site, path):
        told = site.get(path)
        assert (told.status_code, told.json()["error"]["code"]) == (404, "response_not_found")
        assert site.get("/v1/admin/models%0A").status_code == 404


class TestLooking:
    """A GET says what a worker does. It loads nothing, and keeps nothing."""

    def test_it_evicts_nobody(self, site):
        assert site.chat("c").status_code == 200
        told = site.get("/stats?model=b")
        assert (told.status_code, told.json()["error"]["code"]) == (400, "model_not_loaded")
        assert "llmux load b" in told.json()["error"]["message"]
        assert (site.model("c")["state"], site.model("b")["state"]) == ("ready", "stopped")

    def test_it_is_no_use(self, site):
        assert site.chat("b").status_code == 200
        wait_until(lambda: site.model("b")["in_flight"] == 0)
        before = site.model("b")["idle_s"]
        time.sleep(0.3)
        assert site.get("/stats?model=b").json()["requests"] == 1
        assert site.model("b")["idle_s"] > before + 0.2

    def test_a_thing_is_not_looked_at(self, site):
        """A path with a pattern is the name of something that only the model has."""
        assert site.chat("c").status_code == 200
        assert site.get("/files/one?model=b").json()["model"] == "b"

    def test_unless_its_entry_says_so(self, site):
        assert site.chat("c").status_code == 200
        assert site.get("/stats?model=a").status_code == 200
        assert site.model("a")["state"] == "ready"


class TestWebSocket:
    """It loads its model, counts as a request, and passes bytes."""

    def test_echo(self, site):
        assert site.chat("c").status_code == 200
        with WebSocket(site.port, "/ws?model=a", "Sec-WebSocket-Protocol: chat, other") as ws:
            assert (ws.status, ws.headers["sec-websocket-protocol"]) == (101, "chat")
            for data in (b"hello", b"", b"x" * 30_000):
                ws.send(data)
                assert ws.receive() == (TEXT, data)
            assert site.model("a")["in_flight"] == 1
            (running_,) = site.get("/v1/admin/requests").json()["data"]
            assert (running_["model"], running_["path"]) == ("a", "/ws")
            ws.send((1000).to_bytes(2) + b"bye", CLOSE)
            assert ws.receive() == (CLOSE, (1000).to_bytes(2) + b"bye")
            with pytest.raises(EOFError):
                ws.receive()
        wait_until(lambda: site.model("a")["in_flight"] == 0)
        found = site.get("/v1/admin/requests/ended").json()["data"][0]
        assert (found["status"], found["error"]) == (101, None)

    def test_the_worker_ends_it(self, site):
        with WebSocket(site.port, "/ws?model=a") as ws:
            ws.send(b"end")
            assert ws.receive() == (CLOSE, (4001).to_bytes(2) + b"as told")

    def test_the_client_leaves(self, site):
        with WebSocket(site.port, "/ws?model=a") as ws:
            ws.send(b"hello")
            ws.receive()
        wait_until(lambda: site.model("a")["in_flight"] == 0)

    def test_the_worker_is_killed(self, site):
        with WebSocket(site.port, "/ws?model=a") as ws:
            ws.send(b"die")
            with pytest.raises((EOFError, ConnectionResetError)):
                ws.receive()
        assert wait_until(lambda: site.chat("a").status_code == 200)

    def test_its_model_is_unloaded(self, site):
        with WebSocket(site.port, "/ws?model=a") as ws:
            ws.send(b"hello")
            ws.receive()
            site.post("/v1/admin/models/a/unload", params={"force": "true"})
            with pytest.raises((EOFError, ConnectionResetError)):
                ws.receive()

    @pytest.mark.parametrize("path", ["/ws?model=b", "/ws2?model=a", "/v1/models", "/stats?model=a", "/"])
    def test_no_other_path(self, site, path):
        with WebSocket(site.port, path) as ws:
            assert ws.status == 400
            error = json.loads(ws.body)["error"]
        assert error["code"] in {"no_websocket", "endpoint_not_supported"}
        assert path.partition("?")[0] in error["message"]

    def test_a_model_that_can_not_be_loaded(self, site):
        with WebSocket(site.port, "/ws?model=nothing") as ws:
            assert ws.status == 404
