"""Who asks and how urgently: keys, headers and body fields of requests to a real daemon, its clients, and their profiles."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.e2e.admin.test_requests import Client
from tests.support.daemon import fake, running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import Shell

SECRETS = {name: f"sk-{name}-0123456789" for name in ("me", "batch", "chat", "gateway")}
KEYS = f"""\
- {{name: me, key: {SECRETS["me"]}, scopes: [inference, admin, metrics]}}
- {{name: batch, key: {SECRETS["batch"]}, priority: low, priority_ceiling: normal, tenant: research}}
- {{name: chat, key: {SECRETS["chat"]}, priority: high}}
- {{name: gateway, key: {SECRETS["gateway"]}, for_others: true}}
"""
CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/echo", "/v1/audio/transcriptions"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity")
    (folder / "keys.yaml").write_text(KEYS)
    config = {
        "models": {
            "fake": fake(endpoints=PATHS),
            "other": fake(endpoints=[CHAT]),
            "broken": fake("--status=500", endpoints=[CHAT]),
        },
        "clients": {
            "default": {"cooldown_s": 60},
            "amy": {"model": "other", "priority": 30, "parameters": {"temperature": 0.5, "seed": 1}},
            "clumsy": {"cooldown_errors": 2},
            "hasty": {"cooldown_burst": 3},
        },
        "server": {"api_keys": str(folder / "keys.yaml")},
    }
    with running(folder, config) as daemon:
        yield daemon


def bearer(key):
    return {"authorization": f"Bearer {SECRETS[key]}"}


def ask(site, key, path=CHAT, headers=(), **fields):
    return site.post(path, json={"model": "fake", "messages": [], **fields}, headers={**bearer(key), **dict(headers)})


def admin(site, path, **keys):
    answer = site.get(f"/v1/admin/{path}", headers=bearer("me"), **keys)
    assert answer.status_code == 200, answer.text
    return answer.json()


def record(site, answer):
    """What is known of a request that has ended."""
    name = answer.headers["x-request-id"]

    def found():
        data = admin(site, "requests/ended", params={"limit": 1000})["data"]
        return next((entry for entry in data if entry["request_id"] == name), None)

    return wait_until(found, what=f"{name} has ended")


def demand(site, answer):
    found = record(site, answer)
    return found["tenant"], found["priority"]


class TestWhoAsks:
    """Tenant and priority of a request, by its key and by what it says."""

    @pytest.mark.parametrize(
        ("key", "headers", "fields", "tenant", "priority"),
        [
            ("me", {}, {}, "me", 50),
            ("batch", {}, {}, "research", 80),
            ("batch", {"x-tenant-id": "amy"}, {"x_client_id": "amy"}, "research", 80),
            ("chat", {}, {}, "chat", 20),
            ("chat", {"X-Priority": "low"}, {}, "chat", 80),
            ("chat", {}, {"x_priority": 7}, "chat", 7),
            ("gateway", {"x-tenant-id": "bob"}, {"x_client_id": "amy"}, "bob", 50),
            ("gateway", {}, {"x_client_id": "amy"}, "amy", 30),
            ("gateway", {}, {}, "gateway", 50),
        ],
    )
    def test_json(self, site, key, headers, fields, tenant, priority):
        answer = ask(site, key, headers=headers, **fields)
        assert answer.status_code == 200, answer.text
        assert demand(site, answer) == (tenant, priority)
        assert "x-priority" not in answer.headers

    def test_a_tenants_are_found(self, site):
        for who in ("found", "another"):
            answer = ask(site, "gateway", headers={"x-tenant-id": who})
            record(site, answer)
        found = admin(site, "requests/ended", params={"tenant": "found"})["data"]
        assert [(entry["tenant"], entry["key"]) for entry in found] == [("found", "gateway")]

    def test_a_form(self, site):
        form = {"model": "fake", "x_priority": "low", "x_client_id": "bob", "x_more": "1", "language": "en"}
        files = {"file": ("a.wav", b"sound")}
        answer = site.post("/v1/audio/transcriptions", data=form, files=files, headers=bearer("gateway"))
        assert demand(site, answer) == ("bob", 80)
        assert b"x_" not in answer.content
        assert answer.headers["x-llmux-ignored"] == "x_more"
        assert b"language" in answer.content

    def test_the_ceiling_holds_and_the_answer_says_so(self, site):
        answer = ask(site, "batch", x_priority="high")
        assert (answer.status_code, answer.headers["x-priority"]) == (200, "50")
        assert demand(site, answer) == ("research", 50)

    @pytest.mark.parametrize("path", [CHAT, "/echo"])
    def test_no_worker_sees_any_of_it(self, site, path):
        said = {"x-priority": "high", "x-tenant-id": "bob"}
        fields = {"x_priority": 1, "x_client_id": "bob", "x_anything": {"a": 1}, "seed": 3}
        answer = ask(site, "gateway", path, said, **fields)
        received = answer.json().get("received", answer.json())
        assert received == {"model": "fake", "messages": [], "seed": 3}
        assert answer.headers["x-llmux-ignored"] == "x_anything"  # what nobody heard
        assert {name.lower() for name, _ in json.loads(answer.headers.get("x-echo-headers", "[]"))}.isdisjoint(said)

    @pytest.mark.parametrize(
        ("headers", "fields", "code"),
        [
            ({"x-priority": "urgent"}, {}, "invalid_priority"),
            ({}, {"x_priority": 1.5}, "invalid_priority"),
            ({"x-tenant-id": "x" * 65}, {}, "invalid_tenant"),
            ({}, {"x_client_id": ["amy"]}, "invalid_tenant"),
        ],
    )
    def test_what_is_none(self, site, headers, fields, code):
        answer = ask(site, "gateway", headers=headers, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert "expected" in answer.text or "at most 64" in answer.text

    def test_the_log_tells_what_is_unusual(self, site):
        names = [ask(site, *request).headers["x-request-id"] for request in (("me",), ("batch",))]
        lines = {e["request_id"]: e for e in wait_until(lambda: site.events("request.finished"))}
        usual, unusual = (lines[name] for name in names)
        assert {"tenant", "priority"}.isdisjoint(usual)
        assert (unusual["key"], unusual["tenant"], unusual["priority"]) == ("batch", "research", 80)

    def test_commands(self, site, tmp_path):
        name = ask(site, "batch").headers["x-request-id"]
        shell = Shell(tmp_path, site.url, {"LLMUX_API_KEY": SECRETS["me"]})
        told = wait_until(lambda: shell("why", "--request", name).stdout)
        assert f"{name} asked fake at" in told
        assert "for research with priority 80; it ended with 200" in told

    def test_metrics(self, site):
        ask(site, "batch")
        ask(site, "gateway", headers={"x-tenant-id": "somebody"})

        def counted():
            text = site.get("/metrics", headers=bearer("me")).text
            wanted = ('{status="200",tenant="research"}', '{status="200",tenant="other"}')
            return text if all(f"llmux_tenant_requests_total{labels}" in text for labels in wanted) else None

        assert "somebody" not in wait_until(counted, what="both are counted")


class TestClients:
    """What each did, its profile, and its pauses."""

    def test_a_profile(self, site):
        headers = {**bearer("gateway"), "x-tenant-id": "amy"}
        answer = site.post(CHAT, json={"messages": [], "seed": 2}, headers=headers)
        assert answer.json()["received"] == {"messages": [], "seed": 2, "temperature": 0.5}
        assert record(site, answer)["worker"].startswith("other:")
        forms = site.post("/v1/audio/transcriptions", files={"file": b"sound"}, headers=headers)
        assert record(site, forms)["worker"].startswith("fake:"), "its model doesn't serve this path"
        assert b'name="temperature"' in forms.content

    def test_counts(self, site):
        headers = {"x-tenant-id": "a/b c"}
        for model in ("fake", "fake", "nonsense"):
            ask(site, "gateway", headers=headers, model=model)
        view = wait_until(lambda: (v := admin(site, "clients/a%2Fb%20c"))["requests"] == 3 and v["errors"] and v)
        assert (view["id"], view["errors"], view["refused"], view["profile"]) == ("a/b c", 1, 0, None)
        assert view["completion_tokens"] > 0
        assert view["first_seen"] <= view["last_seen"]
        assert {"a/b c", "amy", "clumsy", "hasty"} <= {one["id"] for one in admin(site, "clients")["data"]}

    def test_a_pause_after_errors(self, site):
        headers = {"x-tenant-id": "clumsy"}
        for _ in range(2):
            assert ask(site, "gateway", headers=headers, model="broken").status_code == 500
        refused = wait_until(
            lambda: (a := ask(site, "gateway", headers=headers)).status_code == 429 and a, what="it has to pause"
        )
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "client_cooldown")
        assert "2 of its requests failed in a row" in error["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert ask(site, "gateway", headers={"x-tenant-id": "bob"}).status_code == 200
        path = f"{site.url}/v1/admin/clients/clumsy"
        view = httpx.put(path, json={"cooldown_s": 0}, headers=bearer("me"), timeout=LIMIT_S, trust_env=False).json()
        assert view["cooldown_s"] is None
        assert ask(site, "gateway", headers=headers).status_code == 200
        assert [e["client"] for e in site.events("client.paused")].count("clumsy") == 1

    def test_a_pause_after_a_burst(self, site):
        answers = [ask(site, "gateway", headers={"x-tenant-id": "hasty"}).status_code for _ in range(5)]
        assert answers == [200, 200, 200, 429, 429]

    @pytest.mark.parametrize("body", [{}, {"cooldown_s": -1}, {"cooldown_s": "1"}, {"cooldown_s": True}, {"other": 1}])
    def test_a_pause_that_is_none(self, site, body):
        path = f"{site.url}/v1/admin/clients/amy"
        answer = httpx.put(path, json=body, headers=bearer("me"), timeout=LIMIT_S, trust_env=False)
        assert answer.status_code == 400

    def test_commands(self, site, tmp_path):
        shell = Shell(tmp_path, site.url, {"LLMUX_API_KEY": SECRETS["me"]})
        ask(site, "gateway", headers={"x-tenant-id": "cli"})
        assert "cli pauses for 1 min" in shell("clients", "pause", "cli").stdout
        assert ask(site, "gateway", headers={"x-tenant-id": "cli"}).status_code == 429
        rows = {line.split()[0]: line for line in shell("clients", "list").stdout.splitlines()}
        assert "an operator asked for it" in rows["cli"]
        assert "priority 30" in rows["amy"]
        assert shell("clients", "resume", "cli").returncode == 0
        assert ask(site, "gateway", headers={"x-tenant-id": "cli"}).status_code == 200
        assert shell("clients", "forget", "cli").returncode == 0
        lost = shell("clients", "forget", "cli")
        assert (lost.returncode != 0, "No client 'cli' has been seen" in lost.stderr) == (True, True)


class TestOrder:
    """Who is more urgent is served first, also where nobody needs a key."""

    def test_high_before_low(self, tmp_path):
        with running(tmp_path, {"models": {"one": fake(target_inflight=1, endpoints=[CHAT])}}) as daemon:
            daemon.post("/v1/admin/models/one/load").raise_for_status()
            first = Client(daemon, "first", stream=True, x_client_id="first", fake={"chunks": 100, "chunk_delay": 0.02})
            wait_until(lambda: first.text, what="the worker is busy")
            waiting = []
            for name, said in (("low", {"x_priority": "low"}), ("usual", {}), ("high", {"x_priority": "high"})):
                waiting.append(Client(daemon, name, fake={"chunks": 1}, **said))
                wait_until(lambda: daemon.model("one")["queued"] == len(waiting), what=f"{name} waits")
            shown = Shell(tmp_path, daemon.url)("top", "--once").stdout
            assert {"80", "20"} <= set(" ".join(line for line in shown.splitlines() if "queued" in line).split())
            for client in (first, *waiting):
                client.join(LIMIT_S)
            ended = daemon.get("/v1/admin/requests/ended").json()["data"]
            assert [entry["request_id"] for entry in reversed(ended)] == ["first", "high", "usual", "low"]
            assert [client["id"] for client in daemon.get("/v1/admin/clients").json()["data"]] == ["first"]
