"""Remote models on the ladders of tasks: permission, and the guard that keeps tasks from falling back to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.remote.conftest import remote
from tests.support.daemon import Daemon, fake, running
from tests.support.fake_http import serving
from tests.support.fake_remote import StandIn

KEYS = {name: f"sk-{name}-0123456789" for name in ("boss", "client")}
CONFIG = "/api/v1/config"
VARIABLE = "MODEL_BOSS_ALLOW_CLOUD_FALLBACK"


def ladders(stand_in: StandIn) -> dict[str, object]:
    return {
        "models": {"far": remote(stand_in), "broken": fake("--exit-code", "1"), "near": fake()},
        "tasks": {
            "careful": {"candidates": ["broken", "far"]},
            "free": {"candidates": ["broken", "far"], "allow_remote": True},
            "far-first": {"candidates": ["far", "near"], "allow_remote": True, "pin_primary": True},
            "near-first": {"candidates": ["near", "far"], "allow_remote": True},
        },
        "limits": {"crash_limit": 1},
    }


@pytest.fixture(scope="module")
def remote_server() -> Iterator[StandIn]:
    with serving(StandIn()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def site(tmp_path_factory, environment, remote_server) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("ladders")
    scopes = {"boss": ["admin", "inference"], "client": ["inference"]}
    listed = [{"name": name, "key": key, "scopes": scopes[name]} for name, key in KEYS.items()]
    (folder / "api_keys.yaml").write_text(yaml.safe_dump(listed))
    (folder / "api_keys.yaml").chmod(0o600)
    with running(folder, ladders(remote_server), env=environment) as daemon:
        yield daemon


@pytest.fixture
def client(site):
    with site.client(headers={"authorization": f"Bearer {KEYS['client']}"}) as client:
        yield client


@pytest.fixture
def boss(site):
    with site.client(headers={"authorization": f"Bearer {KEYS['boss']}"}) as client:
        yield client
        client.put(CONFIG, json={"allowCloudFallback": True})


def chat(client, model, **fields):
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return client.post("/v1/chat/completions", json=body)


class TestPermission:
    """A task may let its requests leave this machine; otherwise each says so itself, or stays here."""

    def test_a_request_that_may_not(self, client, remote_server):
        before = len(remote_server.inference())
        error = chat(client, "task:careful").json()["error"]
        assert error["code"] in {"load_failed", "model_failed"}
        assert len(remote_server.inference()) == before

    def test_a_request_that_says_it_may(self, client):
        answer = chat(client, "task:careful", allow_remote=True)
        assert (answer.status_code, answer.headers["x-llmux-model"]) == (200, "far")

    def test_a_task_that_says_so(self, client):
        answer = chat(client, "task:free")
        assert (answer.status_code, answer.headers["x-llmux-model"]) == (200, "far")
        assert answer.headers["x-llmux-reason"].startswith("fallback after ")

    def test_a_remote_is_not_preferred_for_being_ready(self, client, boss):
        boss.post("/v1/admin/models/near/unload?force=true").raise_for_status()
        assert chat(client, "task:near-first").headers["x-llmux-model"] == "near"


class TestGuard:
    """Switched off, no task falls back to a remote model; a primary, and a request that names one, are meant so."""

    def test_no_fallback_leaves_this_machine(self, client, boss, remote_server):
        assert boss.put(CONFIG, json={"allowCloudFallback": False}).json() == {"allowCloudFallback": False}
        before = len(remote_server.inference())
        assert chat(client, "task:free").status_code == 503
        assert chat(client, "task:careful", allow_remote=True).status_code == 503
        assert len(remote_server.inference()) == before
        told = boss.get("/v1/admin/tasks/task:free").json()
        assert [candidate["allowed"] for candidate in told["candidates"]] == [True, False]

    def test_a_primary_is_never_taken_away(self, client, boss):
        boss.put(CONFIG, json={"allowCloudFallback": False})
        answer = chat(client, "task:far-first")
        assert (answer.status_code, answer.headers["x-llmux-model"]) == (200, "far")
        assert answer.headers["x-llmux-reason"] == "primary"

    def test_a_request_that_names_it(self, client, boss):
        boss.put(CONFIG, json={"allowCloudFallback": False})
        assert chat(client, "far", allow_remote=True).status_code == 200

    def test_only_an_admin_may_see_and_change_it(self, client, site):
        for answer in (client.get(CONFIG), client.put(CONFIG, json={"allowCloudFallback": False})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
        assert site.get(CONFIG).status_code == 401

    @pytest.mark.parametrize("body", [{}, {"allowCloudFallback": "no"}, {"allowCloudFallback": None}, {"other": True}])
    def test_mistakes(self, boss, body):
        assert boss.put(CONFIG, json=body).status_code == 400
        assert boss.get(CONFIG).json() == {"allowCloudFallback": True}


class TestKept:
    """The variable says what it is at first; what an operator said is kept over restarts."""

    def test_over_restarts(self, tmp_path, environment, remote_server):
        with running(tmp_path, ladders(remote_server), env=environment | {VARIABLE: "false"}) as daemon:
            assert daemon.get(CONFIG).json() == {"allowCloudFallback": False}
            daemon.stop()
            daemon.start()
            assert daemon.get(CONFIG).json() == {"allowCloudFallback": False}
            with daemon.client() as client:
                client.put(CONFIG, json={"allowCloudFallback": True}).raise_for_status()
            daemon.stop()
            daemon.start()
            assert daemon.get(CONFIG).json() == {"allowCloudFallback": True}

    def test_a_variable_that_says_nothing_clear(self, tmp_path, remote_server):
        daemon = Daemon(tmp_path, ladders(remote_server), env={VARIABLE: "perhaps"}).start(wait=False)
        assert daemon.process.wait(60) != 0
        assert f"{VARIABLE}: expected true or false" in daemon.log_text()
