"""A model that several GPUs share: equal leases on each, measured on each, gone from each before another takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.clients import Call, Gpu, code, worker_tree
from tests.support.daemon import Daemon, fake, running, wait_until

BOTH = "Fake 16 GiB (gpu0) and Fake 16 GiB (gpu1)"


@pytest.fixture
def cards(tmp_path) -> Gpu:
    """Two of 16 GiB."""
    return Gpu(tmp_path, count=2)


def config(gpu: Gpu, **models: dict) -> dict:
    always = {
        "spread": fake(vram_mib=20000, gpus=2, env=gpu.takes(9800)),  # 10000 on each
        "large": fake(vram_mib=12000, env=gpu.takes(12000)),
        "small": fake(vram_mib=3000, env=gpu.takes(3000)),
    }
    return {"devices": "auto", "models": always | models}


def devices(daemon: Daemon) -> list[dict]:
    """The GPUs; behind them comes host memory."""
    *gpus, host = daemon.get("/v1/admin/gpu-memory").json()["devices"]
    assert (host["id"], host["leases"]) == ("host", [])
    return gpus


def leased(daemon: Daemon) -> list[dict[str, int]]:
    """By device: what each model has leased there."""
    return [{lease["model"]: lease["lease_mib"] for lease in device["leases"]} for device in devices(daemon)]


class TestLeases:
    def test_as_much_on_each(self, tmp_path, cards, measured):
        with running(tmp_path, config(cards), env=cards.env) as daemon:
            assert daemon.chat("spread").status_code == 200
            assert leased(daemon) == [{"spread": 10000}, {"spread": 10000}]
            wait_until(lambda: [d["free_mib"] for d in devices(daemon)] == [6584, 6584])
            seen = [device["leases"][0]["measured_mib"] for device in devices(daemon)]
            model = daemon.model("spread")
            assert (model["device"], model["devices"]) == ("gpu0 + gpu1", ["gpu0", "gpu1"])
            assert (model["memory"]["lease_mib"], model["memory"]["measured_mib"]) == (20000, sum(seen))
            assert seen == [9800, 9800]
            environ = Path(f"/proc/{model['worker']['pid']}/environ").read_bytes().split(b"\0")
            visible = next(entry for entry in environ if entry.startswith(b"CUDA_VISIBLE_DEVICES="))
            assert visible.count(b",") == 1
            (admitted,) = [d["reason"] for d in daemon.decisions("spread") if d["kind"] == "admit"]
            measured(reason=admitted)
            assert admitted == f"needs 10000 MiB on each of {BOTH}, 15872 and 15872 free"

    def test_beside_what_leaves_room_on_both(self, tmp_path, cards):
        with running(tmp_path, config(cards), env=cards.env) as daemon:
            assert daemon.chat("small").status_code == 200
            assert daemon.chat("spread").status_code == 200
            assert leased(daemon) == [{"small": 3000, "spread": 10000}, {"spread": 10000}]

    def test_everybody_in_the_way_on_either_goes(self, tmp_path, cards):
        """And nothing starts before both show the memory."""
        cards.write(return_after_s=1.0)
        other = fake(vram_mib=12000, env=cards.takes(12000))
        with running(tmp_path, config(cards, other=other), env=cards.env) as daemon:
            assert daemon.chat("large").status_code == 200
            assert daemon.chat("other").status_code == 200
            assert leased(daemon) == [{"large": 12000}, {"other": 12000}]
            assert daemon.chat("spread").status_code == 200
            assert leased(daemon) == [{"spread": 10000}, {"spread": 10000}]
            (evict,) = [d["reason"] for d in daemon.decisions("spread") if d["kind"] == "evict"]
            assert evict.startswith(f"needs 10000 MiB on each of {BOTH}, 3872 and 3872 free; evicting ")
            assert "large" in evict
            assert "other" in evict
            assert daemon.chat("large").status_code == 200  # and back: it frees both, and the first one is enough
            wait_until(lambda: sorted(leased(daemon), key=len) == [{}, {"large": 12000}])

    def test_killed_in_the_middle_of_a_stream(self, tmp_path, cards):
        """Both devices are free again, and it comes back."""
        with running(tmp_path, config(cards), env=cards.env) as daemon:
            assert daemon.chat("spread").status_code == 200
            call = Call(daemon, "spread", fake={"delay": 30})
            wait_until(lambda: daemon.model("spread")["in_flight"] == 1)
            os.kill(daemon.model("spread")["worker"]["pid"], signal.SIGKILL)
            assert call.result().status in {502, 503}
            wait_until(lambda: not daemon.model("spread")["answering"])  # a dying process may still take a connection
            assert daemon.chat("spread").status_code == 200
            assert leased(daemon) == [{"spread": 10000}, {"spread": 10000}]
            assert daemon.model("spread")["generation"] == 2
            assert worker_tree(daemon, "spread", 1) == []


class TestConfiguration:
    def test_too_few_gpus(self, tmp_path, gpu):
        """That is its own trouble: the others are served."""
        models = {"spread": fake(gpus=2), "other": fake()}
        with running(tmp_path, {"devices": "auto", "models": models}, env=gpu.env) as daemon:
            answer = daemon.chat("spread")
            assert (answer.status_code, code(answer)) == (503, "model_failed")
            assert "gpus: 2 GPUs share the model, and it may run on 1" in answer.text
            assert daemon.chat("other").status_code == 200

    def test_a_part_that_no_two_can_hold(self, tmp_path, cards):
        models = {"spread": fake(vram_mib=40000, gpus=2), "other": fake()}
        with running(tmp_path, {"devices": "auto", "models": models}, env=cards.env) as daemon:
            (warning,) = daemon.model("spread")["warnings"]
            assert "takes 20000 MiB (explicit: one of 2 parts of 40000 MiB: vram_mib of the configuration)" in warning
            assert daemon.chat("other").status_code == 200

    def test_a_runtime_that_uses_one(self, tmp_path, cards):
        problem = refused(
            tmp_path,
            {"devices": "auto", "models": {"m": {"runtime": "chatterbox", "path": str(tmp_path), "gpus": 2}}},
            cards,
        )
        assert "gpus: a worker of chatterbox uses one GPU" in problem
        assert "vllm_serve" in problem

    def test_with_an_override_it_is_too_large(self, tmp_path, cards):
        with running(tmp_path, config(cards), env=cards.env) as daemon:
            answer = daemon.post("/v1/admin/models/spread/load", json={"overrides": {"vram_mib": 40000}})
            assert answer.status_code == 400
            assert code(answer) == "invalid_override"
            assert "takes 20000 MiB" in answer.text


def refused(folder: Path, configuration: dict, gpu: Gpu) -> str:
    """What the daemon says before it doesn't start."""
    with pytest.raises(AssertionError) as told:
        Daemon(folder, configuration, gpu.env).start()
    return str(told.value)
