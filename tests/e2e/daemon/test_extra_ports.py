"""Ports besides the main one: what each answers, with which keys, and what becomes of them when the daemon changes."""

from __future__ import annotations

import socket
from contextlib import closing

import httpx
import pytest
import yaml

from supervisor.catalog.keys import Scope, new_key
from tests.support.daemon import Daemon, fake, running
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

HELLO = [{"role": "user", "content": "hello"}]
ENDPOINTS = ["/v1/chat/completions"]


def ask(port, path, method="GET", **keys):
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=LIMIT_S, **keys)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ports")
    secret, entry = new_key("all", [Scope.INFERENCE, Scope.ADMIN, Scope.METRICS])
    (folder / "keys.yaml").write_text(yaml.safe_dump([entry]))
    first = quiet_ports(2)
    server = {"ollama_port": first, "metrics_port": first + 1, "api_keys": str(folder / "keys.yaml")}
    daemon = Daemon(folder, {"models": {"fake": fake(endpoints=ENDPOINTS)}, "server": server})
    daemon.ollama, daemon.metrics, daemon.mine = first, first + 1, {"authorization": f"Bearer {secret}"}
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


class TestOllama:
    """Ollama's API and inference, and nothing of an operator's but what Ollama's API has itself."""

    def test_a_chat(self, site):
        body = {"model": "fake", "messages": HELLO, "stream": False}
        assert ask(site.ollama, "/api/chat", "POST", json=body, headers=site.mine).json()["done"]
        told = ask(site.ollama, "/v1/chat/completions", "POST", json=body, headers=site.mine)
        assert told.json()["object"] == "chat.completion"

    @pytest.mark.parametrize("path", ["/api/tags", "/api/version", "/v1/models", "/models"])
    def test_with_a_key(self, site, path):
        assert ask(site.ollama, path, headers=site.mine).status_code == 200
        assert ask(site.ollama, path).status_code == 401

    @pytest.mark.parametrize("path", ["/health", "/livez"])
    def test_open_to_all(self, site, path):
        assert ask(site.ollama, path).status_code == 200

    @pytest.mark.parametrize("accept", ["*/*", "text/html"])
    def test_the_root_is_the_same_for_browsers(self, site, accept):
        assert ask(site.ollama, "/", headers={"accept": accept}).text == "Ollama is running"
        assert ask(site.ollama, "/", "HEAD", headers={"accept": accept}).status_code == 200

    def test_what_ollama_calls_an_operators_is_refused_as_on_the_main_port(self, site):
        told = ask(site.ollama, "/api/delete", "DELETE", json={"model": "fake"}, headers=site.mine)
        assert (told.status_code, "llmux remove" in told.json()["error"]) == (501, True)

    @pytest.mark.parametrize(
        "path", ["/v1/admin/models", "/metrics", "/ui", "/ui/", "/ui/index.html", "/api/v1/config", "/models/load"]
    )
    def test_an_operators_paths_are_not_there(self, site, path):
        told = ask(site.ollama, path, headers=site.mine)
        assert told.status_code == 404
        assert "server.ollama_port" in told.json()["error"]["message"]


class TestMetrics:
    """`/metrics` and whether it is alive."""

    def test_metrics_need_their_scope(self, site):
        assert "llmux_" in ask(site.metrics, "/metrics", headers=site.mine).text
        assert ask(site.metrics, "/metrics").status_code == 401

    @pytest.mark.parametrize("path", ["/health", "/v1/health", "/livez"])
    def test_open_to_all(self, site, path):
        assert ask(site.metrics, path).status_code == 200

    @pytest.mark.parametrize("path", ["/", "/ui/", "/v1/models", "/api/tags", "/v1/admin/models", "/metrics/"])
    def test_nothing_else(self, site, path):
        told = ask(site.metrics, path, headers=site.mine)
        assert (told.status_code, "server.metrics_port" in told.text) == (404, True)

    def test_no_chat(self, site):
        body = {"model": "fake", "messages": HELLO}
        assert ask(site.metrics, "/v1/chat/completions", "POST", json=body, headers=site.mine).status_code == 404


class TestStart:
    """Every port is there before the daemon says that it is ready, or the daemon says why it doesn't start."""

    def test_a_port_that_is_taken(self, tmp_path):
        with closing(socket.socket()) as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            daemon = Daemon(tmp_path, {"models": {"a": fake()}, "server": {"metrics_port": port}})
            daemon.start(wait=False)
            assert daemon.process.wait(LIMIT_S) == 1
        log = daemon.log_text()
        assert f"Can't listen on 127.0.0.1:{port} (server.metrics_port): Address already in use" in log
        assert "Choose another port with server.metrics_port" in log
        assert "READY" not in log

    def test_the_variable_of_other_runners(self, tmp_path):
        port = quiet_ports()
        with running(tmp_path, {"models": {"a": fake()}}, env={"METRICS_PORT": str(port)}):
            assert "llmux_" in ask(port, "/metrics").text

    def test_without_keys_only_this_machine_may_reach_them(self, tmp_path):
        server = {"host": "0.0.0.0", "ollama_port": quiet_ports()}
        daemon = Daemon(tmp_path, {"models": {"a": fake()}, "server": server})
        daemon.start(wait=False)
        assert daemon.process.wait(LIMIT_S) == 2
        assert "which others can reach, and there are no API keys" in daemon.log_text()

    def test_a_reload_says_that_they_need_a_restart(self, tmp_path):
        first = quiet_ports(2)
        daemon = Daemon(tmp_path, {"models": {"a": fake()}, "server": {"ollama_port": first}})
        daemon.start()
        try:
            daemon.config["server"] |= {"ollama_port": first + 1, "metrics_port": first}
            daemon.config_path.write_text(yaml.safe_dump(daemon.config))
            told = daemon.post("/v1/admin/reload").json()
            assert sorted(told["needs_restart"]) == ["server.metrics_port", "server.ollama_port"]
            assert ask(first, "/api/version").status_code == 200
            assert daemon.stop() == 0
            daemon.start()
            assert ask(first + 1, "/api/version").status_code == 200
            assert "llmux_" in ask(first, "/metrics").text
        finally:
            daemon.stop()
