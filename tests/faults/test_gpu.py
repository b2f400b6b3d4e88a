"""A GPU whose driver misbehaves: memory that comes back late or never, readings that fail, strangers on the card."""

from __future__ import annotations

import itertools
import sys
import time
from datetime import datetime

import pytest

from tests.support.clients import Call, Gpu, Stream, starts
from tests.support.counts import SOAK
from tests.support.daemon import FAKE_WORKER, fake, running, wait_until

BIG, OTHER = 10000, 9000  # of 16384 MiB: never both


def device(daemon) -> dict:
    return daemon.get("/v1/admin/gpu-memory").json()["devices"][0]


def config(gpu: Gpu, **limits: object) -> dict:
    models = {
        "big": fake(vram_mib=BIG, env=gpu.takes(BIG)),
        "other": fake(vram_mib=OTHER, env=gpu.takes(OTHER)),
        "small": fake(vram_mib=2000, env=gpu.takes(2000)),
    }
    return {"devices": "auto", "models": models, "limits": limits}


def spawned_at(daemon, model: str, number: int = -1) -> float:
    events = [event for event in daemon.events("worker.spawned") if event["model"] == model]
    return datetime.fromisoformat(events[number]["timestamp"]).timestamp()


def ended_at(daemon, model: str) -> float:
    """When the device began to wait for its memory: the worker's end, at the latest."""
    reasons = [d for d in daemon.decisions(model) if d["kind"] == "evicted"]
    return reasons[-1]["at"]


class Test17MemoryReturnsLate:
    """A load starts on measured free memory only, however late that comes back."""

    @pytest.mark.parametrize(("late_s", "warn_s"), [(0, 15), (1.5, 0.5), *([(6, 5), (12, 1)] if SOAK else [])])
    def test_loads_on_measured_memory_only(self, tmp_path, gpu, late_s, warn_s, measured):
        """The next model starts when the card shows the memory, however long that takes, and no sooner."""
        gpu.write(return_after_s=late_s)
        with running(tmp_path, config(gpu, memory_warn_s=warn_s), env=gpu.env) as daemon:
            gaps = []
            for model, evicted in (("big", None), ("other", "big"), ("big", "other")):
                assert daemon.chat(model).status_code == 200
                if evicted is not None:
                    gaps.append(spawned_at(daemon, model) - ended_at(daemon, evicted))
                wait_until(lambda: device(daemon)["free_mib"] < 16384 - 8000)
                held = [lease["lease_mib"] for lease in device(daemon)["leases"]]
                assert sum(held) <= 16384
            assert min(gaps) >= late_s
            late = [alert for alert in daemon.events("alert.raised") if alert["code"] == "memory.late"]
            assert len(late) == (2 if late_s > warn_s else 0)
            measured(memory_back_after_s=late_s, next_start_after_s=[round(gap, 3) for gap in gaps])

    def test_never(self, tmp_path, gpu, measured):
        """The device is quarantined and says so; what is loaded serves on; when the memory returns, so does the device."""
        gpu.write(return_after_s=None)
        limits = {"memory_warn_s": 0.3, "memory_quarantine_s": 1, "max_loaded": {"llm": 2}}
        with running(tmp_path, config(gpu, **limits), env=gpu.env) as daemon:
            assert daemon.chat("small").status_code == 200
            assert daemon.chat("big").status_code == 200
            assert daemon.post("/v1/admin/models/small/load").status_code == 200
            wait_until(lambda: daemon.model("big")["memory"]["measured_mib"] == BIG)
            keeper = Stream(daemon, "small", fake={"chunks": 60, "chunk_delay": 0.05})
            wait_until(lambda: keeper.chunks > 2)
            asked_at = time.monotonic()
            call = Call(daemon, "other")
            wait_until(lambda: device(daemon)["quarantined"])
            quarantined_s = time.monotonic() - asked_at
            assert "big's worker ended" in device(daemon)["blocked"]
            assert keeper.result().ended_cleanly
            assert daemon.chat("small").status_code == 200
            assert starts(daemon, "other") == 0
            assert call.result().status == 503
            alerts = [alert["code"] for alert in daemon.events("alert.raised")]
            assert alerts.count("device.quarantined") == 1
            gpu.write(return_after_s=0)
            lifted_at = time.monotonic()
            wait_until(lambda: not device(daemon)["quarantined"])
            assert daemon.chat("other").status_code == 200
            measured(quarantined_after_s=quarantined_s, served_after_return_s=time.monotonic() - lifted_at)

    def test_shutdown_does_not_wait_for_it(self, tmp_path, gpu):
        """The daemon ends although the memory of its workers is never seen back."""
        gpu.write(return_after_s=None)
        with running(tmp_path, config(gpu), env=gpu.env) as daemon:
            assert daemon.chat("big").status_code == 200
            wait_until(lambda: daemon.model("big")["memory"]["measured_mib"] == BIG)
            assert daemon.stop(25) == 0  # half a minute is what it would be quarantined after


class Test18DriverLost:
    """While the driver fails nothing new is loaded, what is loaded serves on, and nobody waits for the driver."""

    def test_lost(self, tmp_path, gpu, measured):
        """While the driver fails nothing new is loaded and what is loaded serves on; then it goes on by itself."""
        with running(tmp_path, config(gpu), env=gpu.env) as daemon:
            assert daemon.chat("small").status_code == 200
            gpu.write(errors={"nvmlDeviceGetMemoryInfo": 15, "nvmlDeviceGetHandleByUUID": 15})
            wait_until(lambda: device(daemon)["blocked"])
            assert device(daemon)["blocked"] == "lost: GPU is lost"
            assert daemon.chat("big").status_code == 503
            slowest = 0.0
            for _ in range(20):
                began = time.monotonic()
                assert daemon.chat("small").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
            assert starts(daemon, "big") == 0
            gpu.write()
            back_at = time.monotonic()
            wait_until(lambda: device(daemon)["blocked"] is None)
            assert daemon.chat("big").status_code == 200
            measured(served_meanwhile=20, slowest_s=slowest, loaded_after_return_s=time.monotonic() - back_at)

    def test_hangs(self, tmp_path, gpu, measured):
        """A driver that blocks for seconds blocks neither requests nor the admin API."""
        with running(tmp_path, config(gpu), env=gpu.env) as daemon:
            assert daemon.chat("small").status_code == 200
            gpu.write(hang={"nvmlDeviceGetMemoryInfo": 8})
            wait_until(lambda: device(daemon)["blocked"])
            slowest = 0.0
            for _ in range(20):
                began = time.monotonic()
                assert daemon.chat("small").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
            gpu.write()
            assert daemon.chat("big").status_code == 200
            assert slowest < 6
            measured(slowest_meanwhile_s=slowest)


class Test20ProcessList:
    """Leases and the fall of free memory are enough where the driver's process list is not."""

    def test_process_list(self, tmp_path, gpu, measured):
        """Whatever the driver's process list lacks, models are swapped and the books are right."""
        with running(tmp_path, config(gpu), env=gpu.env) as daemon:
            cases = itertools.product(("empty", "error", "host_pids", "no_sizes"), ("big", "other"))
            for listing, model in cases:
                gpu.write(gpu={"list": listing})
                assert daemon.chat(model).status_code == 200
                size = {"big": BIG, "other": OTHER}[model]
                wait_until(lambda size=size: device(daemon)["free_mib"] == 16384 - size)
                leases = device(daemon)["leases"]
                assert [(lease["model"], lease["lease_mib"]) for lease in leases] == [(model, size)]
                assert leases[0]["measured_mib"] in {size, None}
            assert starts(daemon, "big") == starts(daemon, "other") == 4
            measured(lists=4, swaps=8, wrong_leases=0)


class Test19StrangerTakesMemory:
    """A load that lost its memory to a stranger evicts and tries once more."""

    def test_stranger_takes_memory_while_loading(self, tmp_path, gpu, measured):
        """Out of memory while loading is told from other crashes: one evict-and-retry with more room, and the caller is served."""
        once, taken = tmp_path / "tried", tmp_path / "taken"
        text = (
            f"if [ ! -e {once} ]; then touch {once}; while [ ! -e {taken} ]; do sleep 0.05; done; "
            'echo "ggml_cuda: CUDA error: out of memory"; exit 1; fi\n'
            f'exec "$0" -I -S {FAKE_WORKER} --port "$1"'
        )
        program = {"runtime": "command", "cmd": ["/bin/sh", "-c", text, sys.executable, "${port}"]}
        models = {
            "loading": {**program, "vram_mib": 6000, "env": gpu.takes(6000)},
            "idle": fake(vram_mib=4000, env=gpu.takes(4000)),
        }
        with running(tmp_path, {"devices": "auto", "models": models}, env=gpu.env) as daemon:
            assert daemon.chat("idle").status_code == 200
            call = Call(daemon, "loading")
            wait_until(once.exists)
            gpu.write(gpu={"processes": [{"pid": 1, "mib": 5000}]})
            taken.touch()
            assert call.result().status == 200
            assert starts(daemon, "loading") == 2
            assert daemon.model("idle")["state"] == "stopped"
            kinds = [(decision["kind"], decision["reason"]) for decision in daemon.decisions("loading")]
            crashes = [reason for kind, reason in kinds if kind == "crash"]
            assert len(crashes) == 1
            assert crashes[0].startswith("out_of_memory")
            evict = next(reason for kind, reason in kinds if kind == "evict")
            assert "evicting idle (llm, 4000 MiB" in evict
            wait_until(lambda: device(daemon)["outside_mib"] == 5000)
            measured(starts=2, evict=evict)
