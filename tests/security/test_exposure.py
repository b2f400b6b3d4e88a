"""Who is let in without keys: loopback names, allowed origins, paths as they are written."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.e2e.http.conftest import site as site  # a fixture
from tests.support import raw
from tests.support.cases import cases
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S

HOST = "Host: 127.0.0.1"


@pytest.fixture(scope="module")
def open_site(tmp_path_factory):
    config = {
        "models": {"plain": fake(endpoints=["/v1/chat/completions", "/echo"])},
        "server": {"allowed_hosts": ["llm.example.org"], "allowed_origins": ["https://chat.example.org"]},
    }
    with running(tmp_path_factory.mktemp("open"), config) as daemon:
        daemon.post("/v1/admin/models/plain/load").raise_for_status()
        yield daemon


class TestExposure:
    """Without keys, the daemon listens where only this machine can reach it."""

    def test_refuses_to_start_on_another_address(self, tmp_path):
        daemon = Daemon(tmp_path, {"models": {"plain": fake()}, "server": {"host": "0.0.0.0"}})
        daemon.start(wait=False)
        assert daemon.process.wait(LIMIT_S) == 2
        log = daemon.log_text()
        assert "server.host is 0.0.0.0, which others can reach, and there are no API keys" in log
        assert "llmux keys add NAME" in log
        assert "Traceback" not in log


class TestHost:
    """A name that was never configured is a rebound one."""

    @cases(
        "host",
        [
            "127.0.0.1",
            "localhost",
            "LOCALHOST:81",
            "[::1]:8081",
            "192.168.0.9:8081",
            "llm.example.org",
            "LLM.example.org:1",
        ],
    )
    def test_allowed(self, open_site, host):
        assert open_site.get("/v1/models", headers={"host": host}).status_code == 200

    @cases("host", ["evil.example", "127.0.0.1.evil.example", "llm.example.org.evil", "", "[evil", "a@b"])
    def test_refused(self, open_site, host):
        for path in ("/health", "/v1/models", "/v1/admin/models", "/nope"):
            told = raw.request(open_site, f"GET {path} HTTP/1.1", f"Host: {host}")
            assert told.status == 403
            assert json.loads(told.body)["error"]["code"] == "host_not_allowed"

    @pytest.mark.parametrize("name", [socket.gethostname(), "host.docker.internal"])
    def test_this_machines_own_names(self, open_site, name):
        """Whoever controls its network may claim them, so they take a key, which no rebound page has."""
        assert open_site.get("/v1/models", headers={"host": name}).status_code == 403


class TestOrigin:
    """Pages of strangers get nothing; pages of allowed origins get inference; only our own get the admin API."""

    @cases("origin", ["https://evil.example", "null", "http://[", "https://chat.example.org.evil"])
    @cases("path", ["/v1/models", "/v1/admin/models", "/health"])
    def test_strangers(self, open_site, origin, path):
        told = open_site.get(path, headers={"origin": origin})
        assert told.status_code == 403
        assert told.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in told.headers

    @pytest.mark.parametrize("origin", ["https://chat.example.org", "http://localhost:3000", "http://127.0.0.1"])
    def test_allowed_for_inference_only(self, open_site, origin):
        headers = {"origin": origin}
        answer = open_site.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert origin == answer.headers["access-control-allow-origin"]
        assert answer.headers["vary"] == "origin"
        assert (
            origin
            == open_site.post("/echo", json={"model": "plain"}, headers=headers).headers["access-control-allow-origin"]
        )
        failed = open_site.get("/v1/models/nope", headers=headers)
        assert origin == failed.headers["access-control-allow-origin"], "a page must be able to read what went wrong"
        for told in (
            open_site.get("/v1/admin/models", headers=headers),
            open_site.post("/v1/admin/models/plain/unload", headers=headers),
        ):
            assert told.status_code == 403
            assert "access-control-allow-origin" not in told.headers

    def test_our_own_page(self, open_site):
        assert open_site.get("/v1/admin/models", headers={"origin": open_site.url}).status_code == 200
        behind = {"host": "llm.example.org", "origin": "https://llm.example.org"}
        assert open_site.get("/v1/admin/models", headers=behind).status_code == 200

    def test_preflight(self, open_site):
        headers = {
            "origin": "https://chat.example.org",
            "access-control-request-headers": "authorization,x-stainless-os",
        }
        with open_site.client(headers=headers) as client:
            answer = client.options("/v1/chat/completions")
            assert answer.status_code == 204
            assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "access-control-allow-private-network" not in answer.headers
            asked = {"access-control-request-private-network": "true"}
            answer = client.options("/v1/chat/completions", headers=asked)
            assert answer.headers["access-control-allow-private-network"] == "true"
            assert client.options("/v1/admin/models").status_code == 403
        assert raw.request(open_site, "OPTIONS /v1/chat/completions HTTP/1.1", HOST).status == 405


class TestPaths:
    """A path is authorised and served as written, but for the slashes that a base URL doubles; nothing else reaches a worker."""

    @cases(
        "path",
        [
            "/v1/../echo",
            "/echo/",
            "/./echo",
            "/v1/..%2fecho",
            "/%2e/echo",
            "/v1/%2e%2e/echo",
            "/echo%00",
            "/echo%20",
            "/echo;x",
            "/Echo",
            "/v1/chat/completions/",
            "/v1/chat/../../v1/chat/completions",
            # what workers have of their own
            "/stats",
            "/env",
            "/props",
            "/slots/0?action=save",
            "/lora-adapters",
            "/models",
            "/metrics",
            "/apply-template/../props",
        ],
    )
    @cases("method", ["GET", "POST"])
    def test_never_reaches_a_worker(self, open_site, method, path):
        body = b'{"model": "plain"}'
        lines = (f"{method} {path} HTTP/1.1", HOST, f"Content-Length: {len(body)}", "x-request-id: trick")
        told = raw.request(open_site, *lines, body=body)
        if (method, path) not in {
            ("GET", "/models"),
            ("GET", "/metrics"),
            ("GET", "/props"),
        }:  # these are answered here
            assert told.status in {403, 404, 405}, told
            assert "error" in json.loads(told.body)
        port = open_site.model("plain")["worker"]["port"]
        seen = httpx.get(f"http://127.0.0.1:{port}/stats", trust_env=False, verify=False, timeout=LIMIT_S).json()
        assert "trick" not in seen["ids"]

    def test_an_escaped_path_is_the_path(self, open_site):
        body = b'{"model": "plain"}'
        answer = raw.request(open_site, "POST /%65cho HTTP/1.1", HOST, f"Content-Length: {len(body)}", body=body)
        assert (200, body) == (answer.status, answer.body)

    def test_llama_servers_own_management(self, site):
        for path in ("/props", "/slots/0?action=erase", "/lora-adapters", "/models", "/v1/models", "/metrics"):
            told = site.post(path, json={"model": "chat"})
            assert told.status_code in {404, 405}, path
            assert "error" in told.json()

    def test_a_body_can_not_choose_the_upstream(self, open_site):
        assert open_site.post("/echo", json={"model": "plain", "api_base": "http://127.0.0.1:1"}).status_code == 200
        assert open_site.post("/echo", json={"model": "plain", "base_url": "http://127.0.0.1:1"}).status_code == 400


class TestSmuggling:
    """What two parsers could read in two ways is refused, and the connection closed."""

    @cases(
        "lines",
        [
            ("Content-Length: 5", "Transfer-Encoding: chunked"),
            ("Transfer-Encoding: chunked", "Content-Length: 5"),
            ("Content-Length: 5", "Content-Length: 6"),
            ("Content-Length: 5", "Content-Length: 5"),
            ("Content-Length: +5",),
            ("Content-Length: -1",),
            ("Transfer-Encoding: gzip, chunked",),
            ("Transfer-Encoding: identity",),
            ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
            ("Transfer-Encoding : chunked",),
            ("Host: 127.0.0.1", "Content-Length: 0"),
            ("X-Folded: a", " b", "Content-Length: 0"),
        ],
    )
    def test_refused(self, open_site, lines):
        told = raw.request(open_site, "POST /echo HTTP/1.1", HOST, *lines)
        assert told.status == 400
        assert told.closed
        assert json.loads(told.body)["error"]["type"] == "invalid_request_error"

    def test_a_rest_is_no_request(self, open_site):
        smuggled = b"0\r\n\r\nGET /v1/admin/models HTTP/1.1\r\nHost: 127.0.0.1\r\nx-request-id: smuggled\r\n\r\n"
        told = raw.request(
            open_site, "POST /echo HTTP/1.1", HOST, "Content-Length: 4", "Transfer-Encoding: chunked", body=smuggled
        )
        assert (told.status, told.closed) == (400, True)


def test_the_daemon_is_sound_afterwards(open_site):
    """After all that, nothing is in flight and the log has no traceback."""
    wait_until(lambda: open_site.model("plain")["in_flight"] == 0)
    assert not open_site.events("http.application_failed")
    assert "Traceback" not in open_site.log_text()
