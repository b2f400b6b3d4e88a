"""API keys: scopes, expiry, one credential a request, and none that reaches a worker."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess

import httpx
import pytest
import yaml

from tests.e2e.http.conftest import site as site  # a fixture
from tests.support import raw
from tests.support.cases import cases
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import llmux

HOST = "Host: 127.0.0.1"
USER, ADMIN, METRICS, OLD = (f"sk-test-{name}-{'0' * 16}" for name in ("user", "admin", "metrics", "old"))
UMLAUT = "sk-test-schlüssel-0000000000"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    keys = [
        {"name": "user", "key": USER},
        {"name": "admin", "key_sha256": hashlib.sha256(ADMIN.encode()).hexdigest(), "scopes": ["admin"]},
        {"name": "metrics", "key": METRICS, "scopes": ["metrics"]},
        {"name": "old", "key": OLD, "expires": "2020-01-31"},
        {"name": "umlaut", "key": UMLAUT, "expires": "2999-01-31T12:00:00Z"},
    ]
    (folder / "api_keys.yaml").write_text(yaml.safe_dump(keys))
    endpoints = ["/v1/chat/completions", "/echo", "GET /env"]
    config = {"models": {"fake": fake("--key-env", "LLMUX_WORKER_KEY", auth="bearer", endpoints=endpoints)}}
    daemon = Daemon(folder, config)
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": b"Bearer " + key.encode()}


class TestCredentials:
    """Bearer or x-api-key, exactly one, known and not expired."""

    @cases(
        "headers",
        [
            bearer(USER),
            {"authorization": f"bearer   {USER}"},
            {"x-api-key": USER},
            bearer(USER) | {"x-api-key": USER},
            {"authorization": "Bearer", "x-api-key": USER},
            bearer(UMLAUT),
        ],
    )
    def test_accepted(self, guarded, headers):
        assert guarded.get("/v1/models", headers=headers).status_code == 200

    @cases(
        "headers",
        [
            {},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
            {"authorization": f"Basic {USER}"},
            {"authorization": USER},
            bearer(USER[:-1]),
            bearer(USER + "0"),
            bearer(OLD),
            bearer("ключ" * 8),
            {"x-api-key": b"\xff\xfe" * 16},
            {"cookie": f"key={USER}"},
        ],
    )
    @cases("path", ["/v1/models", "/v1/admin/models", "/nope", "/metrics"])
    def test_refused(self, guarded, headers, path):
        told = guarded.get(path, headers=headers)
        assert told.status_code == 401
        assert told.headers["www-authenticate"] == "Bearer"
        error = told.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")

    def test_two_different_ones(self, guarded):
        for headers in (
            bearer(USER) | {"x-api-key": ADMIN},
            bearer(USER) | {"x-api-key": "nonsense"},
            [("authorization", f"Bearer {USER}"), ("authorization", f"Bearer {ADMIN}")],
        ):
            told = guarded.get("/v1/models", headers=headers)
            assert told.status_code == 400
            assert told.json()["error"]["code"] == "conflicting_credentials"

    def test_with_keys_this_machine_is_known_by_its_own_names(self, guarded):
        name = socket.gethostname()
        local = f"{name.partition('.')[0]}.local"
        for host in (name, f"{name.upper()}:8081", local, "host.docker.internal:8081"):
            assert guarded.get("/v1/models", headers=bearer(USER) | {"host": host}).status_code == 200
            assert guarded.get("/v1/models", headers={"host": host}).status_code == 401
        assert guarded.get("/v1/models", headers=bearer(USER) | {"host": f"{name}.evil"}).status_code == 403

    def test_health_is_open(self, guarded):
        assert guarded.get("/health").status_code == 200
        assert guarded.get("/health", headers={"authorization": "Basic x"}).status_code == 200

    def test_a_refused_request_starts_nothing(self, guarded):
        assert guarded.chat("fake").status_code == 401
        decisions = guarded.get("/v1/admin/decisions", params={"model": "fake"}, headers=bearer(ADMIN)).json()["data"]
        assert not decisions


class TestScopes:
    """A key opens what it was made for."""

    def test_inference(self, guarded):
        assert guarded.get("/v1/models", headers=bearer(USER)).status_code == 200
        for key in (ADMIN, METRICS):
            told = guarded.get("/v1/models", headers=bearer(key))
            assert (told.status_code, told.json()["error"]["code"]) == (403, "insufficient_scope")

    def test_the_remedy_names_the_scope(self, guarded):
        for headers in ({}, bearer(USER)):
            told = guarded.get("/metrics", headers=headers).json()["error"]["message"]
            assert told.endswith("llmux keys add NAME --scope metrics")

    def test_admin(self, guarded):
        assert guarded.get("/v1/admin/models", headers=bearer(ADMIN)).status_code == 200
        for key in (USER, METRICS):
            for told in (
                guarded.get("/v1/admin/models", headers=bearer(key)),
                guarded.post("/v1/admin/models/fake/load", headers=bearer(key)),
                guarded.get("/v1/admin/nope", headers=bearer(key)),
                guarded.post("/models/load", json={"model": "fake"}, headers=bearer(key)),
                guarded.post("/models/unload", json={"model": "fake"}, headers=bearer(key)),
            ):
                assert told.status_code == 403
                assert "'admin'" in told.json()["error"]["message"]

    @pytest.mark.parametrize("path", ["/v1/%61dmin/models", "/v1/admin%2fmodels", "/v1/admin/"])
    def test_admin_by_another_spelling(self, guarded, path):
        assert raw.request(guarded, f"GET {path} HTTP/1.1", HOST, f"x-api-key: {USER}").status == 403

    @pytest.mark.parametrize("line", ["GET /metrics%0A", "POST /models/load%0a", "POST /models/unload%0A"])
    def test_a_line_break_opens_nothing(self, guarded, line):
        body = b'{"model": "fake"}'
        length = f"Content-Length: {len(body)}"
        told = raw.request(guarded, f"{line} HTTP/1.1", HOST, f"x-api-key: {USER}", length, body=body)
        assert (told.status, json.loads(told.body)["error"]["code"]) == (404, "not_found")


class TestWorkers:
    """Workers have a key of their own, and never see a client's."""

    def test_no_credential_reaches_it(self, guarded):
        answer = guarded.post(
            "/echo",
            json={"model": "fake"},
            headers=bearer(USER)
            | {"x-api-key": USER, "cookie": f"key={USER}", "proxy-authorization": f"Bearer {USER}"},
        )
        assert answer.status_code == 200
        received = json.loads(answer.headers["x-echo-headers"])
        assert USER not in str(received)
        (own,) = [value for name, value in received if name == "authorization"]
        assert own.startswith("Bearer ")
        assert len(own) > 40

    def test_its_environment_has_no_key_of_clients(self, guarded):
        environment = guarded.get("/env?model=fake", headers=bearer(USER)).json()
        assert USER not in str(environment)
        assert not [name for name in environment if "LLMUX_API" in name]

    def test_its_port_is_no_way_around(self, guarded):
        guarded.post("/echo", json={"model": "fake"}, headers=bearer(USER)).raise_for_status()
        view = guarded.get("/v1/admin/models/fake", headers=bearer(ADMIN)).json()
        url = f"http://127.0.0.1:{view['worker']['port']}/echo"
        for headers in ({}, bearer(USER), bearer(ADMIN)):
            told = httpx.post(url, json={}, headers=headers, trust_env=False, verify=False, timeout=LIMIT_S)
            assert told.status_code == 401

    def test_llama_servers_port_is_none_either(self, site):
        site.chat("chat").raise_for_status()
        url = f"http://127.0.0.1:{site.model('chat')['worker']['port']}"
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        for headers in ({}, {"authorization": "Bearer none is needed here"}):
            told = httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, verify=False, timeout=60
            )
            assert told.status_code == 401

    def test_the_log_names_the_key_and_does_not_tell_it(self, guarded):
        guarded.post("/echo", json={"model": "fake"}, headers=bearer(USER) | {"x-request-id": "who-was-it"})
        (line,) = wait_until(
            lambda: [line for line in guarded.events("request.finished") if line["request_id"] == "who-was-it"]
        )
        assert line["key"] == "user"
        assert USER not in guarded.log_text()


class TestNewKeys:
    """`llmux keys add` makes a key that the daemon takes."""

    def llmux(self, *words: str) -> subprocess.CompletedProcess[str]:
        return llmux("keys", "new", *words)

    def test_into_an_existing_file(self, tmp_path):
        path = tmp_path / "api_keys.yaml"
        path.write_text(f"# ours\nkeys:\n  - name: user\n    key: {USER}")
        path.chmod(0o644)
        made = self.llmux(
            "ops", "--scope", "admin", "--scope", "inference", "--expires", "2999-01-31", "--file", str(path)
        )
        assert made.returncode == 0, made.stderr
        secret = made.stdout.strip()
        assert "only time" in made.stderr
        assert path.read_text().startswith("# ours\nkeys:\n")
        assert secret not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        daemon = Daemon(tmp_path, {"models": {"plain": fake()}})
        try:
            daemon.start()
            for path in ("/v1/models", "/v1/admin/models"):
                assert daemon.get(path, headers=bearer(secret)).status_code == 200
            assert daemon.get("/v1/models", headers=bearer(USER)).status_code == 200
            assert daemon.get("/v1/models").status_code == 401
        finally:
            daemon.stop()

    def test_beside_the_configuration(self, tmp_path):
        config = tmp_path / "llmux.yaml"
        config.write_text("models: {}\nserver:\n  host: 0.0.0.0\n")
        assert self.llmux("a", "--config", str(config)).returncode == 0
        assert self.llmux("b", "--config", str(config)).returncode == 0
        entries = yaml.safe_load((tmp_path / "api_keys.yaml").read_text())
        assert [(entry["name"], entry["scopes"]) for entry in entries] == [
            ("a", ["inference", "admin"]),
            ("b", ["inference"]),
        ]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["api_keys.yaml", "llmux.yaml"]

    def test_refused(self, tmp_path):
        path = tmp_path / "keys.yaml"
        assert self.llmux("a", "--file", str(path)).returncode == 0
        before = path.read_bytes()
        taken = self.llmux("a", "--file", str(path))
        assert (taken.returncode, taken.stdout) == (1, "")
        assert "choose another name" in taken.stderr
        assert self.llmux("b", "--expires", "soon", "--file", str(path)).returncode == 2
        assert self.llmux("b", "--scope", "root", "--file", str(path)).returncode == 2
        assert before == path.read_bytes()
        path.write_text("{}")
        mistaken = self.llmux("b", "--file", str(path))
        assert mistaken.returncode == 2
        path.write_text(json.dumps([{"name": "a", "key": USER}]))
        by_hand = self.llmux("b", "--file", str(path))
        assert by_hand.returncode == 1
        assert "key_sha256" in by_hand.stderr
        assert json.loads(path.read_text()) == [{"name": "a", "key": USER}]
        assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]
