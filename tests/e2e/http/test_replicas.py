"""Several workers of one model, on real llama.cpp servers: who answers, what is listed, what the end of one means."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.shell import Shell


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {
        "devices": [{"kind": "host", "budget_mib": 4000, "margin_mib": 0}],
        "models": {
            "chat": gguf(vram_mib=300, replicas=2, parallel=2),
            "busy": fake("--chunk-delay", "0.05", "--chunks", "25", replica_max=3, target_inflight=1),
            "pair": fake("--chunk-delay", "0.05", "--chunks", "20", replicas=2, target_inflight=2),
            "alone": fake(),
        },
        "virtual_models": {"assistant": {"model": "chat"}},
        "limits": {"replica_idle_s": 1, "keepalive_s": 0.2},
    }
    with running(tmp_path_factory.mktemp("replicas"), config) as daemon:
        yield daemon


@pytest.fixture
def two(site: Daemon) -> Daemon:
    site.post("/v1/admin/models/chat/load").raise_for_status()
    wait_until(lambda: len(ready(site, "chat")) == 2)
    return site


def ready(site: Daemon, model: str) -> dict[str, dict]:
    """Its replicas that answer, by worker."""
    return {each["worker"]: each for each in site.model(model)["replicas"] if each["answering"]}


def workers(site: Daemon, model: str, count: int) -> list[str]:
    """Who answered its last requests, newest first."""
    ended = site.get("/v1/admin/requests/ended", params={"model": model, "limit": count}).json()["data"]
    return [each["worker"].rpartition(":")[0] for each in ended]


def say(site: Daemon, *said: str) -> str:
    """A conversation's next turn; the answer."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    answer = site.post("/v1/chat/completions", json={"model": "chat", "messages": messages, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return message.get("content") or message["reasoning_content"]


class TestAnswers:
    """The replica that knows the conversation, else the one with the fewest requests."""

    def test_requests_at_once_are_spread(self, site):
        site.post("/v1/admin/models/pair/load").raise_for_status()
        wait_until(lambda: len(ready(site, "pair")) == 2)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda n: site.chat("pair", text=f"Hello {n}", stream=True), range(4)))
        assert {answer.status_code for answer in answers} == {200}
        assert not [answer for answer in answers if "pair#2" in answer.text]
        assert Counter(workers(site, "pair", 4)) == {"pair": 2, "pair#2": 2}

    def test_a_conversation_stays_where_it_is(self, two):
        conversations = {first: [first] for first in ("Alpha", "Beta", "Gamma", "Delta")}
        for _ in range(3):
            for said in conversations.values():
                said += [say(two, *said), "And then?"]
        seen = workers(two, "chat", 12)
        assert [set(seen[n::4]) for n in range(4)] == [{seen[n]} for n in range(4)]
        assert set(seen) == {"chat", "chat#2"}


class TestShown:
    """One model for clients, one row with its replicas for operators."""

    def test_clients_see_one_model(self, two):
        names = [model["id"] for model in two.get("/v1/models").json()["data"]]
        assert names == ["assistant", "busy", "pair", "alone"]
        assert two.post("/v1/chat/completions", json={"model": "chat#2", "messages": []}).status_code == 404

    def test_operators_see_one_row_with_replicas(self, two):
        rows = [row for row in two.get("/v1/admin/models").json()["data"] if row["name"].startswith("chat")]
        (row,) = rows
        assert row["state"] == "ready"
        assert row["replica_max"] == 2
        assert [each["worker"].partition(":")[0] for each in row["replicas"]] == ["chat", "chat#2"]
        assert len({each["pid"] for each in row["replicas"]} | {each["port"] for each in row["replicas"]}) == 4
        assert row["memory"]["lease_mib"] == 600

    def test_metrics_count_the_model(self, two):
        two.chat("chat", max_tokens=1)
        text = two.get("/metrics").text
        assert 'llmux_requests_total{model="chat",status="200"}' in text
        assert 'model="chat#2",state=' not in text
        assert 'llmux_worker_lease_bytes{device="host",model="chat#2"}' in text

    def test_the_terminal(self, two, tmp_path):
        shell = Shell(tmp_path, two.url)
        row = next(line for line in shell("ps").stdout.splitlines() if line.startswith("chat "))
        assert "ready ×2" in row


class TestEnd:
    """One may end, and the others go on."""

    def test_a_killed_one_comes_back_and_the_other_answers(self, two):
        before = ready(two, "chat")
        (victim, killed), (_, other) = sorted(before.items())
        os.kill(killed["pid"], signal.SIGKILL)
        wait_until(lambda: victim not in ready(two, "chat"))
        assert say(two, "Are you there?")
        assert two.model("chat")["state"] == "ready"
        wait_until(lambda: len(ready(two, "chat")) == 2)
        assert other["pid"] in {each["pid"] for each in ready(two, "chat").values()}

    def test_unload_ends_all(self, two):
        pids = [each["pid"] for each in ready(two, "chat").values()]
        two.post("/v1/admin/models/chat/unload").raise_for_status()
        assert two.model("chat")["replicas"] == []
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


class TestHowMany:
    """As many as the queue needs, and no longer than it needs them."""

    def test_more_while_requests_wait(self, site):
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(site.chat, "busy", stream=True) for _ in range(12)]
            wait_until(lambda: len(ready(site, "busy")) == 3)
            assert {answer.result().status_code for answer in answers} == {200}
        assert {"busy", "busy#2", "busy#3"} <= set(workers(site, "busy", 12))
        wait_until(lambda: len(site.model("busy")["replicas"]) == 1)
        assert site.model("busy")["state"] == "ready"


class TestMistakes:
    """They are said with their place."""

    @pytest.mark.parametrize(
        ("keys", "told"),
        [
            ({"replicas": 3, "replica_max": 2}, "replica_max is 2, and replicas is 3"),
            ({"replicas": 0}, "replicas"),
            (
                {"runtime": "openai_remote", "base_url": "http://127.0.0.1:9/v1", "upstream_model": "m", "replicas": 2},
                "replicas",
            ),
        ],
    )
    def test_in_the_configuration(self, tmp_path, keys, told):
        model = keys if "runtime" in keys else fake(**keys)
        daemon = Daemon(tmp_path, {"models": {"m": model}}).start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(60) != 0
        assert told in daemon.log_text()

    def test_a_replica_s_name(self, tmp_path):
        daemon = Daemon(tmp_path, {"models": {"m#2": fake()}}).start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(60) != 0
        assert "those of replicas" in daemon.log_text()
