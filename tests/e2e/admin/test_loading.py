"""The admin API: what runs, loading and unloading, memory, and why."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support import raw
from tests.support.daemon import fake, gguf, running, wait_until
from tests.support.held import frozen

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """Room for two of the fakes, not three."""
    config = {
        "devices": [{"kind": "host", "budget_mib": 250, "margin_mib": 0}],
        "models": {
            "a": fake(grace_s=1),
            "b": fake(grace_s=1),
            "c": fake(grace_s=1, priority=150),
            "stubborn": fake("--ignore-term", grace_s=60),
            "broken": fake("--exit-code", "3", "--log-text", "reading\\nno such file: weights.bin"),
            "real": gguf(vram_mib=90),
        },
        "virtual_models": {"alias": {"model": "a"}},
        "limits": {"min_residency_s": 0, "crash_limit": 1, "drain_s": 60},
    }
    with running(tmp_path_factory.mktemp("roomy"), config) as daemon:
        yield daemon


def load(daemon, name) -> httpx.Response:
    return daemon.post(f"/v1/admin/models/{name}/load")


def unload(daemon, name, query="") -> httpx.Response:
    return daemon.post(f"/v1/admin/models/{name}/unload{query}")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


class TestModels:
    """Every configured model with its whole state."""

    def test_list(self, roomy):
        rows = {row["name"]: row for row in roomy.get("/v1/admin/models").json()["data"]}
        assert list(rows) == ["a", "b", "c", "stubborn", "broken", "real"]
        assert rows["a"]["virtual_models"] == ["alias"]
        assert (rows["real"]["type"], rows["real"]["runtime"], rows["real"]["priority"]) == ("llm", "llama_server", 100)
        assert rows["c"]["priority"] == 150

    def test_one_unknown(self, roomy):
        told = roomy.get("/v1/admin/models/aliass")
        assert told.status_code == 404
        assert "'alias'" in told.json()["error"]["message"]


class TestLoad:
    """Loading waits until the model is ready, and tells why it isn't going to be."""

    def test_load(self, roomy):
        answer = load(roomy, "alias")
        assert answer.status_code == 200
        view = answer.json()
        assert (view["name"], view["state"], view["answering"]) == ("a", "ready", True)
        assert view["memory"]["lease_mib"] == 100
        pid = view["worker"]["pid"]
        assert "fake_worker.py" in Path(f"/proc/{pid}/cmdline").read_text()
        assert load(roomy, "a").json()["worker"]["pid"] == pid, "once more changes nothing"

    def test_broken(self, roomy):
        told = load(roomy, "broken")
        assert told.status_code == 503
        error = told.json()["error"]
        assert error["code"] == "load_failed"
        assert error["detail"][-1] == "no such file: weights.bin"
        crash = roomy.model("broken")["crash"]
        assert crash["exit_code"] == 3
        assert "no such file: weights.bin" in crash["log_tail"]

    def test_broken_again(self, roomy):
        load(roomy, "broken")
        generation = roomy.model("broken")["generation"]
        assert roomy.chat("broken").status_code == 503, "a request does not try again what was given up"
        assert roomy.model("broken")["generation"] == generation
        assert load(roomy, "broken").status_code == 503
        assert roomy.model("broken")["generation"] > generation, "an operator does"

    @pytest.mark.parametrize("query", ["?force=maybe", "?force="])
    def test_mistaken_flag(self, roomy, query):
        told = unload(roomy, "a", query)
        assert (told.status_code, told.json()["error"]["param"]) == (400, "force")


class TestUnload:
    """Unloading lets requests end, unless it is forced, and returns when the memory is back."""

    def test_idle(self, roomy):
        pid = load(roomy, "a").json()["worker"]["pid"]
        view = unload(roomy, "a").json()
        assert (view["state"], view["worker"], view["memory"]["lease_mib"]) == ("stopped", None, None)
        assert is_gone(pid)
        assert unload(roomy, "a").status_code == 200, "once more changes nothing"

    def test_graceful(self, roomy):
        pid = load(roomy, "a").json()["worker"]["pid"]
        answers, views = [], []
        asking = threading.Thread(target=lambda: answers.append(roomy.chat("a")))
        unloading = threading.Thread(target=lambda: views.append(unload(roomy, "a").json()))
        with frozen(pid):
            asking.start()
            wait_until(lambda: roomy.model("a")["in_flight"] == 1)
            unloading.start()
            roomy.wait_state("a", "draining")
        asking.join()
        unloading.join()
        assert [answer.status_code for answer in answers] == [200]
        assert [view["state"] for view in views] == ["stopped"]

    def test_forced(self, roomy):
        pid = load(roomy, "stubborn").json()["worker"]["pid"]
        with raw.pending(roomy, CHAT, {"model": "stubborn", "fake": {"delay": 600}}) as client:
            wait_until(lambda: roomy.model("stubborn")["in_flight"] == 1)
            started = time.monotonic()
            assert unload(roomy, "stubborn", "?force=true").json()["state"] == "stopped"
            assert time.monotonic() - started < 40, "neither drain nor grace was waited for"
            assert is_gone(pid)
            assert client.recv(12) == b"HTTP/1.1 503", "the client is told why"

    def test_a_get_changes_nothing(self, roomy):
        load(roomy, "a")
        assert roomy.get("/v1/admin/models/a/unload").status_code == 404
        assert roomy.model("a")["state"] == "ready"


class TestMemory:
    """Devices, leases and footprints add up."""

    def test_gpu_memory(self, roomy):
        load(roomy, "a")
        view = roomy.get("/v1/admin/gpu-memory").json()
        (device,) = view["devices"]
        assert (device["id"], device["kind"], device["total_mib"]) == ("host", "host", 250)
        leases = {lease["model"]: lease for lease in device["leases"]}
        assert leases["a"]["lease_mib"] == 100
        needs = {model["name"]: model["need"]["host"] for model in view["models"]}
        assert (needs["a"]["mib"], needs["a"]["source"]) == (100, "explicit")

    def test_measured(self, roomy):
        load(roomy, "real")
        measured = wait_until(lambda: roomy.model("real")["memory"]["measured_mib"], what="it was measured")
        assert 5 < measured < 500


class TestDecisions:
    """What was decided, and why, in words."""

    def test_an_eviction_names_its_reason(self, roomy):
        for name in ("real", "stubborn"):
            unload(roomy, name, "?force=true")
        load(roomy, "a")
        load(roomy, "b")
        assert load(roomy, "c").status_code == 200
        (gone,) = [name for name in ("a", "b") if roomy.model(name)["state"] == "stopped"]
        reasons = [decision["reason"] for decision in roomy.decisions("c") if decision["kind"] == "evict"]
        assert f"evicting {gone}" in reasons[-1]
        assert "100 MiB" in reasons[-1]

    def test_limits(self, roomy):
        assert len(roomy.get("/v1/admin/decisions?limit=2").json()["data"]) == 2
        sequence = [decision["seq"] for decision in roomy.decisions()]
        assert sequence == sorted(sequence)
        assert {decision["model"] for decision in roomy.decisions("alias")} == {"a"}
        for query in ("limit=0", "limit=x", "limit=1001"):
            assert roomy.get(f"/v1/admin/decisions?{query}").status_code == 400
        assert roomy.get("/v1/admin/decisions?model=nobody").status_code == 404


class TestHealth:
    """Anybody may ask whether the daemon lives."""

    def test_health(self, roomy):
        answer = roomy.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
