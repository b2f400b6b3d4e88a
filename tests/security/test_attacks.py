"""The attacks that have no file of their own: what a client writes, what a worker may know, what is remembered."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import httpx
import pytest
import yaml

from runtimes.registry import REGISTRY
from supervisor.catalog.keys import new_key
from tests.support import raw
from tests.support.cases import cases
from tests.support.daemon import REPOSITORY, Daemon, fake, wait_until
from tests.support.limits import LIMIT_S
from tests.support.wire import answering, ok, post, proxied, talk, worker

HOST = "Host: 127.0.0.1"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "secret-of-a-cloud",
    "HF_TOKEN": "hf_secret",
    "OPENAI_API_KEY": "sk-secret-of-a-remote",
    "LLMUX_API_KEY": "sk-llmux-secret-of-the-operator",
    "SSH_AUTH_SOCK": "/secret/agent",
}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A daemon with keys, secrets in its environment, and a worker that asks for its own key."""
    folder = tmp_path_factory.mktemp("keyed")
    secret, entry = new_key("both", scopes=["inference", "admin"])
    (folder / "api_keys.yaml").write_text(yaml.safe_dump([entry]))
    endpoints = ["/v1/chat/completions", "/echo", "GET /env", "GET /stats"]
    model = fake("--key-env", "LLMUX_WORKER_KEY", auth="bearer", endpoints=endpoints)
    daemon = Daemon(folder, {"models": {"plain": model}, "limits": {"crash_limit": 1}}, env=SECRETS)
    try:
        daemon.start()
        daemon.key = secret
        daemon.mine = {"authorization": f"Bearer {secret}"}
        daemon.post("/v1/admin/models/plain/load", headers=daemon.mine).raise_for_status()
        yield daemon
    finally:
        daemon.stop()


def seen_by_worker(target) -> dict[str, object]:
    port = target.model("plain")["worker"]["port"]
    return httpx.get(f"http://127.0.0.1:{port}/stats", trust_env=False, verify=False, timeout=LIMIT_S).json()


class TestPaths:
    """Whole addresses in a request line are no way around, and no route of a worker's own is reachable."""

    @cases(
        "address",
        [
            "http://127.0.0.1/env",
            "http://evil.example/env",
            "http://evil.example/v1/chat/completions",
            "file:///etc/passwd",
            "127.0.0.1:1",
            "@127.0.0.1:1/stats",
            "*",
            "http://127.0.0.1.evil.example/v1/chat/completions",
            "http://127.0.0.1@evil.example/v1/chat/completions",
            "https://127.0.0.1/v1/chat/completions",
            "//127.0.0.1/v1/chat/completions",
            "/%2e%2e/stats",
            "/v1/chat/completions%0a",
            "/v1/chat/completions%0d%0a",
            "/v1/chat/completions;/../stats",
            "/v1/chat/completions/..;/stats",
            "/V1/CHAT/COMPLETIONS",
            "/v1\\chat\\completions",
            "/v1/chat/completions\u00a0",
        ],
    )
    def test_no_address_but_the_exact_one(self, target, address):
        body = b'{"model": "plain"}'
        mark = f"address-{address.encode('unicode-escape').hex()}"
        for method in ("GET", "POST"):
            lines = (f"{method} {address} HTTP/1.1", HOST, f"Content-Length: {len(body)}", f"x-request-id: {mark}")
            assert raw.request(target, *lines, body=body).status in {400, 403, 404, 405}
        assert mark not in seen_by_worker(target)["ids"]

    def test_a_whole_address_with_its_own_host_is_the_path(self, target):
        assert (
            raw.request(
                target, f"GET http://127.0.0.1:{target.port}/v1/models HTTP/1.1", f"Host: 127.0.0.1:{target.port}"
            ).status
            == 200
        )

    @cases(
        "path",
        [
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/sleep", "/wake_up"),
            *("/collective_rpc", "/update_weights", "/start_profile", "/server_info", "/pause", "/scale_elastic_ep"),
            *("/slots", "/slots/0?action=restore", "/props", "/lora-adapters", "/shutdown", "/inference/v1/generate"),
        ],
    )
    def test_routes_of_workers(self, target, path):
        for method in ("GET", "POST", "PUT", "DELETE"):
            with target.client(headers={"x-request-id": "own-route"}) as client:
                ours = {200} if (method, path) == ("GET", "/props") else set[int]()
                assert client.request(method, path, json={"model": "plain"}).status_code in {403, 404, 405} | ours
        assert "own-route" not in seen_by_worker(target)["ids"]


class TestStateChanges:
    """Only POST and DELETE change something."""

    @cases(
        "path",
        ["models/plain/load", "models/plain/unload", "models/plain/pin", "reload", "models/idle/load"],
    )
    @cases("method", ["GET", "HEAD", "PUT", "PATCH"])
    def test_by_another_method(self, target, method, path):
        before = [(view["name"], view["state"], view["pin"]) for view in self.models(target)]
        for headers in ({}, {"x-http-method-override": "POST"}, {"x-method-override": "POST"}):
            with target.client(headers=headers) as client:
                assert client.request(method, f"/v1/admin/{path}?_method=POST").status_code in {404, 405}
        assert [(view["name"], view["state"], view["pin"]) for view in self.models(target)] == before

    def models(self, target):
        return target.get("/v1/admin/models").json()["data"]


class TestSmuggling:
    """Fields that one reader drops and another believes reach no worker."""

    @cases(
        "lines",
        [
            ("Content-Length: 5, 5",),
            ("Content-Length: 0x5",),
            ("Content-Length: 5 5",),
            ("Content-Length: 1_0",),
            ("Content-Length: ",),
            ("Content-Length: 99999999999999999999999",),
            ("Transfer-Encoding: xchunked",),
            ("Transfer-Encoding: chunked, identity",),
            ("Transfer-Encoding: \x0bchunked",),
            ("Transfer-Encoding: chunked;q=1",),
            ('Transfer-Encoding: "chunked"',),
            (" Transfer-Encoding: chunked",),
            ("Transfer-Encoding\t: chunked",),
            ("Transfer-Encoding:\n chunked",),
            ("X: a\nTransfer-Encoding: chunked",),
            ("X: a\rTransfer-Encoding: chunked", "Content-Length: 0"),
            ("Host: 127.0.0.1", "Content-Length: 0"),
            ("hOST: evil.example", "Content-Length: 0"),
            ("X y: a", "Content-Length: 0"),
            (": a", "Content-Length: 0"),
        ],
    )
    def test_refused(self, target, lines):
        told = raw.request(target, "POST /echo HTTP/1.1", HOST, *lines)
        assert told.status in {400, 413}
        assert told.closed

    def test_fields_of_one_connection_end_with_it(self, target):
        body = b'{"model": "plain"}'
        told = raw.request(
            target,
            "POST /echo HTTP/1.1",
            HOST,
            f"Content-Length: {len(body)}",
            "Connection: X-Hop, x-forwarded-for, keep-alive",
            "X-Hop: a",
            "X-Forwarded-For: 10.0.0.1",
            "Keep-Alive: timeout=9",
            "Proxy-Connection: keep-alive",
            "TE: trailers",
            "Upgrade: websocket",
            "X-Stays: b",
            body=body,
        )
        assert told.status == 200
        names = {name.lower() for name, _ in json.loads(told.header("x-echo-headers") or "[]")}
        assert "x-stays" in names
        assert not names & {"x-hop", "x-forwarded-for", "keep-alive", "proxy-connection", "te", "upgrade"}


class TestRedirects:
    """A worker can't send the daemon elsewhere."""

    @cases("status", [301, 302, 303, 307, 308])
    async def test_are_not_followed(self, status):
        async with worker(answering(ok(b"{}"))) as elsewhere:
            to = b"Location: http://127.0.0.1:%d/v1/x" % elsewhere.port
            away = b"HTTP/1.1 %d Away\r\n%b\r\nContent-Length: 0\r\n\r\n" % (status, to)
            async with proxied(answering(away)) as (front, behind):
                told = await talk(front.port, post())
            assert behind.accepted == 1
            assert elsewhere.accepted == 0
        assert told.startswith((b"HTTP/1.1 %d" % status, b"HTTP/1.1 502"))


class TestNames:
    """A model's name is looked up and nothing else: no path, no argument, no format is made of it."""

    @cases(
        "name",
        [
            *("../../../../etc/passwd", "/etc/passwd", "plain/../plain", "..", ".", "", "plain\0", "plain\n", " plain"),
            *("PLAIN", "%s%s%s%n", "{0.__class__}", "{plain}", "${jndi:ldap://x}", "$(id)", "`id`", "; id", "--help"),
            *("plain%00", "plain%2f..", "\u202enialp", "plain\u200b", "p\u00adlain"),
        ],
    )
    def test_only_looked_up(self, target, name):
        before = sorted(str(path) for path in target.folder.rglob("*"))
        told = target.chat(name)
        assert told.status_code in {400, 404}
        assert told.json()["error"]["code"] != "internal_error"
        quoted = "".join(f"%{byte:02x}" for byte in name.encode())
        for method, path in (("GET", ""), ("GET", "/logs"), ("POST", "/load"), ("POST", "/unload")):
            with target.client() as client:
                status = client.request(method, f"/v1/admin/models/{quoted}{path}").status_code
            assert status in ({200, 400, 404, 405} if not name else {400, 404, 405})
        assert sorted(str(path) for path in target.folder.rglob("*")) == before
        assert "Traceback" not in target.log_text()


class TestSecrets:
    """A worker knows its own key and nothing of ours; no argv and no core dump has it."""

    def test_environment(self, keyed):
        environment = keyed.get("/env?model=plain", headers=keyed.mine).json()
        assert "LLMUX_WORKER_KEY" in environment
        assert not SECRETS.keys() & environment.keys()
        assert not [value for value in SECRETS.values() if value in str(environment)]

    def test_argv_and_cores(self, keyed):
        environment = keyed.get("/env?model=plain", headers=keyed.mine).json()
        own = environment["LLMUX_WORKER_KEY"].encode()
        found = keyed.workers()
        assert len(found) >= 2, "a shim and a worker"
        for pid in (*found, keyed.process.pid):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert own not in argv
            assert not [value for value in (*SECRETS.values(), keyed.key) if value.encode() in argv]
        for pid in found:
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert re.search(r"Max core file size +0 +0 ", limits)

    def test_the_port_asks_for_it(self, keyed):
        port = keyed.get("/v1/admin/models/plain", headers=keyed.mine).json()["worker"]["port"]
        for headers in ({}, keyed.mine, {"authorization": "Bearer"}, {"x-api-key": keyed.key}):
            told = httpx.post(
                f"http://127.0.0.1:{port}/echo", json={}, headers=headers, trust_env=False, timeout=LIMIT_S
            )
            assert told.status_code == 401


class TestLogs:
    """They have neither bodies nor credentials, whatever becomes of a request, and a line is a line."""

    def test_have_nothing_of_a_request(self, keyed):
        marks = ("whisper-in-a-body", "whisper-in-a-header", "whisper-in-a-query", "whisper-in-a-name")
        for model, more in (
            ("plain", {}),
            ("none-such", {}),
            ("plain", {"fake": {"status": 500}}),
            ("plain", {"x": 1e400}),
        ):
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": marks[0]}], **more})
            for key in (keyed.key, f"sk-{marks[1]}"):
                headers = {"authorization": f"Bearer {key}", "cookie": marks[1], "x-secret": marks[1]}
                keyed.post(f"/v1/chat/completions?token={marks[2]}", content=body, headers=headers)
        keyed.post("/v1/chat/completions", content=f'{{"model": "plain", {marks[0]}', headers=keyed.mine)
        keyed.chat("plain", text=marks[0])
        ended = {"x-request-id": "the-last"} | keyed.mine
        keyed.post("/echo", json={"model": "plain"}, headers=ended)
        wait_until(lambda: [line for line in keyed.events("request.finished") if line["request_id"] == "the-last"])
        assert keyed.events("request.finished")
        for mark in (*marks[:3], keyed.key):
            assert mark not in keyed.log_text()

    @pytest.mark.parametrize("forged", ["a\r\nforged: 1", 'a\n{"event": "forged"}', "a\u2028forged", "a\x1b[2Jforged"])
    def test_no_line_is_forged(self, target, forged):
        target.chat(forged)
        target.get("/v1/models/" + "".join(f"%{byte:02x}" for byte in forged.encode()))
        for line in target.log_text().splitlines():
            assert not line.startswith(("forged", '{"event": "forged"'))
            assert "\x1b" not in line


class TestSupply:
    """What is run is what was pinned, and nothing runs a model's own code unasked."""

    LOCKS = sorted(path for path in REPOSITORY.rglob("*.lock") if not {".venv", ".git"} & set(path.parts))

    def test_every_lock_pins_by_hash(self):
        assert len(self.LOCKS) >= 3
        for lock in self.LOCKS:
            for line in lock.read_text().replace("\\\n", " ").splitlines():
                words = line.partition("#")[0].strip()
                if words and not words.startswith("-"):
                    assert re.match(r"\S+ ?(==|@) ?\S+", words), f"{lock.name}: {words}"
                    assert "--hash=sha256:" in words, f"{lock.name}: {words}"

    def test_code_of_models_is_off(self):
        for name in REGISTRY.names():
            field = REGISTRY.get(name).config.model_fields.get("trust_remote_code")
            assert field is None or field.default is False
        for path in (REPOSITORY / "runtimes").rglob("*.py"):
            assert "trust_remote_code=True" not in path.read_text(), path

    def test_no_shell_and_no_unsafe_loader(self):
        for folder in ("supervisor", "runtimes"):
            for path in (REPOSITORY / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Call):
                        called = ast.unparse(node.func)
                        assert called not in {
                            "os.system",
                            "os.popen",
                            "yaml.load",
                            "yaml.unsafe_load",
                            "pickle.load",
                        }, path
                        for word in node.keywords:
                            assert not (word.arg == "shell" and ast.unparse(word.value) != "False"), path
