"""Loads as tasks: what is under way and how far it is, what came of the last ones, cancelling, and what a restart leaves."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from tests.support.daemon import REPOSITORY, Daemon, fake, gguf, running, wait_until
from tests.support.shell import LLMUX, Shell

SLOW = ("--start-delay", "60")
NUMBERS = {"mean_error_s", "mean_error"}


@pytest.fixture
def site(tmp_path) -> Iterator[Daemon]:
    config = {
        "devices": [{"kind": "host", "budget_mib": 1000, "margin_mib": 0}],
        "models": {
            "chat": gguf(vram_mib=200),
            "quick": fake(),
            "slow": fake(*SLOW, "--log-text", "reading\\nLoading shards:  40%|####      | 2/5"),
            "big": fake("--chunks", "200", "--chunk-delay", "0.05", vram_mib=950),
            "broken": fake("--exit-code", "1", "--log-text", "unknown model architecture"),
        },
    }
    with running(tmp_path, config) as daemon:
        yield daemon


def cancel(site: Daemon, number: str) -> httpx.Response:
    with site.client() as client:
        return client.delete(f"/v1/admin/loads/{number}")


def loads(site: Daemon, model: str | None = None) -> list[dict[str, Any]]:
    """Newest first."""
    found = site.get("/v1/admin/loads").json()["data"]
    return [load for load in found if model in {None, load["model"]}]


def loading(site: Daemon, model: str) -> dict[str, Any]:
    """Its load, once it is under way."""
    found = wait_until(lambda: [load for load in loads(site, model) if load["state"] == "loading"])
    return found[0]


class TestList:
    def test_a_load_that_succeeds(self, site):
        assert site.chat("chat").status_code == 200
        (load,) = loads(site, "chat")
        assert (load["state"], load["progress"], load["eta_s"]) == ("ready", 1.0, None)
        assert (load["worker"], load["generation"]) == ("chat", 1)
        assert load["devices"] == ["host"]
        assert load["lease_mib"] == 200
        assert load["asked_at"] <= load["started_at"] <= load["ended_at"]
        assert load["took_s"] == pytest.approx(site.model("chat")["load_s"], abs=0.01)
        assert load["expected_s"] is None
        assert site.get(f"/v1/admin/loads/{load['id']}").json() == load

    def test_the_second_has_an_estimate_that_is_compared(self, site):
        assert not NUMBERS & {name for name, value in estimates(site).items() if value is not None}
        for _ in range(2):
            site.post("/v1/admin/models/quick/load").raise_for_status()
            site.post("/v1/admin/models/quick/unload").raise_for_status()
        second, first = loads(site, "quick")
        assert second["expected_s"] == pytest.approx(first["took_s"], abs=0.01)
        told = estimates(site)
        assert told["loads"] == 1
        off_s = abs(second["took_s"] - second["expected_s"])
        assert told["mean_error_s"] == pytest.approx(off_s, abs=0.002)
        assert told["mean_error"] == pytest.approx(off_s / second["took_s"], abs=0.01, rel=0.05)  # times are in ms

    def test_progress_by_the_log(self, site):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(site.chat, "slow")
            wait_until(lambda: loading(site, "slow")["progress"] >= 0.4)
            load = loading(site, "slow")
            assert load["stage"].startswith("Loading shards:")
            assert load["eta_s"] > 0
            assert cancel(site, load["id"]).status_code == 200
            assert answer.result().status_code == 503

    def test_one_that_waits_for_room(self, site):
        with ThreadPoolExecutor(1) as pool:
            with hogged(site) as waiting:
                asked = pool.submit(waiting, "quick")
                (load,) = wait_until(lambda: loads(site, "quick"))
                assert (load["state"], load["started_at"], load["took_s"]) == ("waiting", None, None)
                assert "big" in load["reason"]
            assert asked.result().status_code == 200
        (load,) = loads(site, "quick")
        assert load["state"] == "ready"
        assert load["waited_s"] > 0

    def test_one_that_fails(self, site):
        assert site.post("/v1/admin/models/broken/load").status_code == 503
        assert {load["state"] for load in loads(site, "broken")} <= {"failed", "waiting", "loading"}
        failed = [load for load in loads(site, "broken") if load["state"] == "failed"]
        assert "unknown model architecture" in failed[0]["reason"]

    def test_none_is_begun_where_there_can_be_no_room(self, site):
        site.post("/v1/admin/models/quick/pin", json={"pin": True})
        site.post("/v1/admin/models/quick/load").raise_for_status()
        assert site.chat("big").status_code == 503
        assert not loads(site, "big")

    def test_they_are_told_as_they_go(self, site):
        with site.client() as client, client.stream("GET", "/v1/admin/events?types=load") as stream:
            lines = stream.iter_lines()
            next(lines)
            site.post("/v1/admin/models/quick/load").raise_for_status()
            told = []
            for line in lines:
                if line.startswith("data: "):
                    told.append(json.loads(line.removeprefix("data: "))["state"])
                if told[-1:] == ["ready"]:
                    break
        assert list(dict.fromkeys(told)) == ["waiting", "loading", "ready"]


@contextlib.contextmanager
def hogged(site: Daemon) -> Iterator[Callable[..., httpx.Response]]:
    """While another model answers, and leaves no room; gives a function that sends a request to a model."""
    site.post("/v1/admin/models/big/load").raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(site.chat, "big", stream=True)
        wait_until(lambda: site.model("big")["in_flight"] == 1)

        def ask(model: str, **keys: Any) -> httpx.Response:
            with site.client() as client:
                body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
                return client.post("/v1/chat/completions", json=body, **keys)

        yield ask
        site.post("/v1/admin/models/big/unload", params={"force": "true"})
        busy.exception()


def estimates(site: Daemon) -> dict[str, Any]:
    return site.get("/v1/admin/loads").json()["estimates"]


class TestEnds:
    """Each load says in a word and a sentence how it ended."""

    def test_a_retry_with_more_memory_is_another_load(self, tmp_path):
        oom = fake("--exit-code", "1", "--log-text", "CUDA error: out of memory")
        with running(tmp_path, {"models": {"oom": oom}}) as site:
            assert site.chat("oom").status_code == 503
            second, first = loads(site, "oom")
            assert (first["state"], second["state"]) == ("failed", "failed")
            assert "out of memory" in first["reason"]
            assert second["lease_mib"] > first["lease_mib"]

    def test_who_waited_has_left(self, site):
        with hogged(site) as waiting, contextlib.suppress(httpx.TimeoutException):
            waiting("quick", timeout=1)
        ended = wait_until(lambda: [load for load in loads(site, "quick") if load["ended_at"]])
        assert (ended[0]["state"], ended[0]["reason"]) == ("cancelled", "nobody waits for it any more")

    def test_it_was_unloaded_while_it_waited(self, site):
        with hogged(site) as waiting, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(waiting, "quick")
            wait_until(lambda: loads(site, "quick"))
            site.post("/v1/admin/models/quick/unload").raise_for_status()
            assert asked.result().status_code == 503
        assert loads(site, "quick")[0]["reason"] == "unloaded by an operator"

    def test_its_model_was_removed(self, site):
        with hogged(site) as waiting, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(waiting, "quick")
            (load,) = wait_until(lambda: loads(site, "quick"))
            del site.config["models"]["quick"]
            site.config_path.write_text(yaml.safe_dump(site.config))
            site.post("/v1/admin/reload").raise_for_status()
            assert asked.result().status_code == 404
            assert site.get(f"/v1/admin/loads/{load['id']}").json()["state"] == "cancelled"

    def test_it_waits_for_a_retry_after_a_crash(self, tmp_path):
        crashing = fake("--exit-code", "1", "--log-text", "segfault")
        with running(tmp_path, {"models": {"c": crashing}, "limits": {"backoff_first_s": 50}}) as site:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(site.chat, "c")
                waiting, failed = wait_until(lambda: (found := loads(site)) if len(loads(site)) == 2 else None)
                assert (waiting["state"], failed["state"]) == ("waiting", "failed")
                assert cancel(site, waiting["id"]).json()["state"] == "cancelled"
                assert asked.result().status_code == 503
            assert site.model("c")["state"] == "stopped"


class TestCancel:
    def test_one_that_loads(self, site):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.post, "/v1/admin/models/slow/load")
            load = loading(site, "slow")
            answer = cancel(site, load["id"])
            assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
            assert asked.result().status_code == 503
            assert "cancelled by an operator" in asked.result().json()["error"]["message"]
        wait_until(lambda: site.model("slow")["state"] == "stopped")
        assert loads(site, "slow")[0]["reason"] == "load cancelled by an operator"
        decisions = site.get("/v1/admin/decisions", params={"model": "slow"}).json()["data"]
        assert decisions[-1]["kind"] == "cancel"

    def test_one_that_waits(self, site):
        with hogged(site) as waiting, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(waiting, "quick")
            (load,) = wait_until(lambda: loads(site, "quick"))
            assert cancel(site, load["id"]).json()["state"] == "cancelled"
            told = asked.result()
            assert (told.status_code, told.json()["error"]["code"]) == (503, "model_unloaded")
            assert "quick" in told.json()["error"]["message"]
            assert site.model("big")["state"] == "ready"  # nothing went for it

    def test_what_can_not_be_cancelled(self, site):
        site.post("/v1/admin/models/quick/load").raise_for_status()
        (load,) = loads(site, "quick")
        answer = cancel(site, load["id"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "load_ended")
        assert "it is ready" in answer.json()["error"]["message"]
        assert site.model("quick")["state"] == "ready"
        for number in ("0", "999", "x", "%2e"):
            assert cancel(site, number).status_code == 404
            assert site.get(f"/v1/admin/loads/{number}").json()["error"]["code"] == "load_not_found"

    def test_a_model_that_was_cancelled_can_be_loaded_again(self, site):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.chat, "slow")
            first = loading(site, "slow")
            cancel(site, first["id"])
            assert asked.result().status_code == 503
            asked = pool.submit(site.chat, "slow")
            second = loading(site, "slow")
            assert int(second["id"]) > int(first["id"])
            cancel(site, second["id"])
            asked.result()


class TestRestart:
    @pytest.mark.parametrize("end", ["kill", "stop"])
    def test_the_list_tells_what_happened(self, site, end):
        site.post("/v1/admin/models/quick/load").raise_for_status()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.chat, "slow")
            load = loading(site, "slow")
            with site.client() as client:  # answered once it is on disk, and all that was kept before it as well
                client.put("/api/v1/config", json={"allowCloudFallback": True}).raise_for_status()
            getattr(site, end)()
            asked.exception()
        site.start()
        slow, quick = loads(site)
        assert (slow["id"], slow["state"]) == (load["id"], "interrupted")
        assert "llmux" in slow["reason"]
        assert (quick["model"], quick["state"]) == ("quick", "ready")
        site.post("/v1/admin/models/quick/load").raise_for_status()
        newest = loads(site)[0]
        assert int(newest["id"]) == int(slow["id"]) + 1
        assert newest["expected_s"] == pytest.approx(quick["took_s"], abs=0.01)

    def test_what_can_not_be_read_is_left_out(self, site):
        site.post("/v1/admin/models/quick/load").raise_for_status()
        site.stop()
        with contextlib.closing(sqlite3.connect(site.state_dir / "state.sqlite3")) as file, file:
            for number, value in enumerate(['{"kind": "load", "worker": 5}', "[]", "{}"], 7):
                file.execute("INSERT INTO entries VALUES ('jobs', ?, ?)", (f"load-{number}", value))
        site.start()
        assert [load["model"] for load in loads(site)] == ["quick"]
        assert {event["job"] for event in site.events("job.unreadable")} >= {"load-7", "load-8", "load-9"}

    def test_they_are_kept_in_order(self, site):
        for _ in range(3):
            site.post("/v1/admin/models/quick/load").raise_for_status()
            site.post("/v1/admin/models/quick/unload").raise_for_status()
        site.stop()
        site.start()
        assert [load["id"] for load in loads(site)] == ["3", "2", "1"]


class TestCommand:
    def test_list_and_cancel(self, site, tmp_path):
        shell = Shell(tmp_path, site.url)
        assert "Nothing was loaded yet." in shell("loads", "list").stdout
        site.post("/v1/admin/models/quick/load").raise_for_status()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.chat, "slow")
            load = loading(site, "slow")
            listed = shell("loads", "list").stdout
            assert [line.split()[:3] for line in listed.splitlines()[1:3]] == [
                [load["id"], "slow", "loading"],
                ["1", "quick", "ready"],
            ]
            told = shell("loads", "cancel", load["id"]).stdout
            assert "The load of slow is cancelled." in told
            asked.result()
        as_json = json.loads(shell("loads", "list", "--limit", "1", "--json").stdout)
        assert [one["state"] for one in as_json["data"]] == ["cancelled"]
        again = shell("loads", "cancel", load["id"])
        assert again.returncode != 0
        assert "it is cancelled" in again.stderr

    def test_events_tell_of_them(self, site, tmp_path):
        shell, out = Shell(tmp_path, site.url), tmp_path / "out"
        with out.open("wb") as file:
            command = [*LLMUX, "events", "--types", "load"]
            listener = subprocess.Popen(command, env=shell.env(), cwd=REPOSITORY, stdout=file)
        try:

            def heard() -> bool:
                site.post("/v1/admin/models/quick/load").raise_for_status()  # until it listens
                site.post("/v1/admin/models/quick/unload").raise_for_status()
                return "quick: ready  loaded in" in out.read_text()

            wait_until(heard)
        finally:
            listener.kill()
            listener.wait()
