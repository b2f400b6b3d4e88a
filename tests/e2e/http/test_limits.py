"""Limits that clients meet: of their own, and of the queue. Each refusal says what the limit is and when to come again."""

from __future__ import annotations

import time

import pytest

from tests.support import raw
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.held import held

CHAT = "/v1/chat/completions"
SECRET, GATEWAY = "sk-a-key-for-the-tests", "sk-a-gateway-for-the-tests"
RATE_HEADERS = ("limit", "remaining", "reset")


def ask(daemon: Daemon, tenant: str | None = None, key: str | None = None, model: str = "a", **fields):
    headers = {} if tenant is None else {"X-Tenant-ID": tenant}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return daemon.post(CHAT, json=body, headers=headers)


def told(answer, counted: str = "requests") -> tuple[str, ...]:
    return tuple(answer.headers[f"x-ratelimit-{part}-{counted}"] for part in RATE_HEADERS)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    config = {
        "models": {"a": fake(preload=True)},
        "clients": {"bob": {"concurrency": 7}, "vip": {"request_rate": None}},
    }
    env = {"TENANT_RATE_LIMIT_community-x": "2req/h", "DEFAULT_RATE_LIMIT": "3req/h"}
    with running(tmp_path_factory.mktemp("tenants"), config, env=env) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "api_keys.yaml"
    keys.write_text(
        f"- {{name: phone, key: {SECRET}, request_rate: 5/min, token_rate: 10/h}}\n"
        f"- {{name: gateway, key: {GATEWAY}, for_others: true, request_rate: 3/h}}\n"
    )
    keys.chmod(0o600)
    config = {
        "models": {"a": fake(preload=True)},
        "clients": {"default": {"request_rate": "1/h", "concurrency": 9}, "alice": {"request_rate": "2/h"}},
    }
    with running(folder, config) as daemon:
        yield daemon


class TestTenants:
    """Limits of tenants, as the variables of other runners set them."""

    def test_one_more_than_the_limit(self, daemon):
        first, second = ask(daemon, "community-x"), ask(daemon, "community-x")
        assert (first.status_code, second.status_code) == (200, 200)
        assert told(first) == ("2", "1", "30m0s")
        assert told(second)[:2] == ("2", "0")
        before = time.time()
        refused = ask(daemon, "community-x")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "tenant community-x" in error["message"]
        assert "2 requests per hour" in error["message"]
        assert (error["limit"], error["remaining"]) == (2, 0)
        assert before < error["resetAt"] <= time.time() + 3601
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("120", "false"), (
            "in half an hour"
        )
        assert told(refused)[:2] == ("2", "0")

    def test_others_go_on(self, daemon):
        assert told(ask(daemon, "alice"))[:2] == ("3", "2")
        assert told(ask(daemon, "bob"))[:2] == ("3", "2"), "what its entry leaves open is the default's"
        assert "x-ratelimit-limit-requests" not in ask(daemon, "vip").headers

    def test_what_is_not_served_costs_nothing(self, daemon):
        assert ask(daemon, "carol", model="nobody's").status_code == 404
        assert told(ask(daemon, "carol"))[1] == "2"

    def test_without_a_name_they_are_one_tenant(self, daemon):
        assert [ask(daemon).status_code for _ in range(4)] == [200, 200, 200, 429]

    def test_in_the_shape_of_the_dialect(self, daemon):
        body = {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
        refused = [daemon.post("/v1/messages", json=body, headers={"X-Tenant-ID": "dave"}) for _ in range(4)][-1]
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["limit"] == 3

    def test_a_stream_that_begins_before_its_turn_says_what_is_left(self, tmp_path):
        gate = tmp_path / "gate"
        config = {
            "models": {"slow": held(gate)},
            "limits": {"keepalive_s": 0.1},
            "clients": {"alice": {"request_rate": "5/h"}},
        }
        fields = {"model": "slow", "messages": [], "stream": True, "x_client_id": "alice"}
        with running(tmp_path, config) as daemon, daemon.client() as client:
            with client.stream("POST", CHAT, json=fields) as answer:
                assert not gate.exists()
                assert told(answer) == ("5", "4", "12m0s")
                gate.touch()
                assert "[DONE]" in answer.read().decode()
            assert told(ask(daemon, "alice", model="slow"))[1] == "3"

    def test_the_operator_sees_it(self, daemon):
        for _ in range(4):
            ask(daemon, "erin")
        limits = daemon.get("/v1/admin/queue").json()["limits"]
        (mine,) = [row for row in limits if row["account"] == "tenant erin"]
        assert (mine["counts"], mine["limit"], mine["remaining"], mine["period_s"]) == ("requests", 3, 0, 3600.0)
        reasons = [row["reason"] for row in daemon.get("/v1/admin/decisions?model=a").json()["data"]]
        assert "The limit of tenant erin is reached: 3 requests per hour." in reasons
        assert 'llmux_refusals_total{reason="rate_limit_exceeded"}' in daemon.get("/metrics").text


class TestKeys:
    """A key's own limits; a gateway's count beside those of whom it speaks for."""

    def test_its_own_take_the_place_of_the_defaults(self, guarded):
        answer = ask(guarded, key=SECRET)
        assert answer.status_code == 200, answer.text
        assert told(answer)[:2] == ("5", "4")

    def test_tokens_are_charged_when_they_are_known(self, guarded):
        before = ask(guarded, key=SECRET)
        usage = before.json()["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] > 0
        wait_until(lambda: told(ask(guarded, key=SECRET), "tokens")[1] == "0")
        refused = ask(guarded, key=SECRET)
        assert refused.status_code == 429
        assert "tokens per hour" in refused.json()["error"]["message"]
        assert told(refused, "tokens")[:2] == ("10", "0")

    def test_a_gateway_and_its_tenants(self, guarded):
        answers = [ask(guarded, tenant, GATEWAY) for tenant in ("alice", "alice", "alice", "bob", "carol")]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 200, 429]
        assert "tenant alice" in answers[2].json()["error"]["message"]
        assert "key gateway" in answers[4].json()["error"]["message"]


class TestConcurrency:
    """Requests that wait or run."""

    def test_an_end_makes_room(self, tmp_path):
        gate = tmp_path / "gate"
        config = {"models": {"a": held(gate)}, "clients": {"alice": {"concurrency": 1}}}
        with running(tmp_path, config) as daemon:
            with raw.pending(daemon, CHAT, {"model": "a", "x_client_id": "alice"}):
                daemon.wait_state("a", "starting")
                refused = ask(daemon, "alice")
                assert refused.status_code == 429
                assert "1 request at once" in refused.json()["error"]["message"]
                assert refused.json()["error"]["limit"] == 1
            gate.touch()
            wait_until(lambda: ask(daemon, "alice").status_code == 200)


class TestQueue:
    """How many may wait, and for how long."""

    def test_a_full_queue_tells_its_depth_and_its_waits(self, tmp_path):
        gate = tmp_path / "gate"
        config = {"models": {"slow": held(gate)}}
        with running(tmp_path, config, env={"MAX_QUEUE_DEPTH": "1"}) as daemon:
            with raw.pending(daemon, CHAT, {"model": "slow"}):
                daemon.wait_state("slow", "starting")
                refused = ask(daemon, model="slow")
                assert refused.status_code == 503
                error = refused.json()["error"]
                assert (error["code"], error["queueDepth"], error["avgWaitMs"]) == ("queue_full", 1, None)
                assert int(refused.headers["retry-after"]) >= 1
                queue = daemon.get("/v1/admin/queue").json()
                assert (queue["depth"], queue["max_depth"], queue["in_flight"]) == (1, 1, 0)
                assert [(row["name"], row["depth"]) for row in queue["models"]] == [("slow", 1)]
            gate.touch()
            wait_until(lambda: ask(daemon, model="slow").status_code == 200)
            queue = daemon.get("/v1/admin/queue").json()
            assert queue["depth"] == 0
            assert queue["p95_wait_ms"] >= queue["avg_wait_ms"] >= 0

    def test_a_wait_that_is_too_long(self, tmp_path):
        config = {"models": {"slow": fake("--start-delay", "600")}}
        with running(tmp_path, config, env={"QUEUE_TIMEOUT_MS": "300"}) as daemon:
            refused = ask(daemon, model="slow")
            assert refused.status_code == 504
            assert refused.json()["error"]["code"] == "queue_timeout"
            assert refused.headers["retry-after"] == "30"
            assert 'llmux_refusals_total{reason="queue_timeout"} 1.0' in daemon.get("/metrics").text
