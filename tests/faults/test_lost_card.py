"""A card that is lost or quarantined: what could only go there fails at once and says why, until the card is back."""

from __future__ import annotations

import time

import pytest

from tests.support import fake_nvml
from tests.support.clients import Call, Gpu, code
from tests.support.daemon import fake, running, wait_until

BIG, SMALL = 10000, 2000
CARD = {"total_mib": 16384, "name": "NVIDIA Fake 16 GiB"}
LOST = {"errors": {"nvmlDeviceGetMemoryInfo": 15, "nvmlDeviceGetHandleByUUID": 15}}


def config(gpu: Gpu, **limits: object) -> dict:
    models = {
        "loaded": fake(vram_mib=SMALL, env=gpu.takes(SMALL)),
        "first": fake(vram_mib=BIG, env=gpu.takes(BIG)),
        "second": fake(vram_mib=BIG, env=gpu.takes(BIG)),
    }
    return {"devices": "auto", "models": models, "limits": limits}


def devices(daemon) -> dict[str, dict]:
    return {device["id"]: device for device in daemon.get("/v1/admin/gpu-memory").json()["devices"]}


def failed(response, why: str) -> None:
    assert (response.status_code, code(response)) == (503, why)
    assert "Fake 16 GiB (gpu0) is " in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


def test_lost(tmp_path, gpu, measured):
    """What is loaded serves on; everything else fails in a moment instead of waiting, and is served once the card is back."""
    with running(tmp_path, config(gpu, queue_wait_s=3600), env=gpu.env) as daemon:
        assert daemon.chat("loaded").status_code == 200
        gpu.write(gpu=LOST)
        wait_until(lambda: devices(daemon)["gpu0"]["blocked"] == "lost: GPU is lost")
        began = time.monotonic()
        response = daemon.chat("first")
        refused_s = time.monotonic() - began
        failed(response, "device_lost")
        assert response.json()["error"]["message"] == "first can't be loaded: Fake 16 GiB (gpu0) is lost: GPU is lost"
        assert daemon.chat("loaded").status_code == 200
        assert "Fake 16 GiB (gpu0) is lost" in daemon.post("/v1/admin/models/first/load").json()["error"]["message"]
        gpu.write()
        wait_until(lambda: devices(daemon)["gpu0"]["blocked"] is None)
        assert daemon.chat("first").status_code == 200
        alerts = [alert["code"] for alert in daemon.events("alert.raised")]
        assert alerts == ["device.lost", "device.lifted"]
        measured(refused_s=refused_s)


def test_quarantined(tmp_path, gpu, measured):
    """Who waits for memory that never comes back is told when that is clear, and whoever comes later at once."""
    gpu.write(return_after_s=None)
    limits = {"memory_warn_s": 0.3, "memory_quarantine_s": 1, "min_residency_s": 0, "queue_wait_s": 3600}
    with running(tmp_path, config(gpu, **limits), env=gpu.env) as daemon:
        assert daemon.chat("first").status_code == 200
        wait_until(lambda: daemon.model("first")["memory"]["measured_mib"] == BIG)
        waiting = Call(daemon, "second").result()
        failed(waiting.response, "device_quarantined")
        began = time.monotonic()
        failed(daemon.chat("second"), "device_quarantined")
        refused_s = time.monotonic() - began
        gpu.write(return_after_s=0)
        wait_until(lambda: not devices(daemon)["gpu0"]["quarantined"])
        assert daemon.chat("second").status_code == 200
        measured(waited_s=waiting.elapsed_s, refused_s=refused_s)


@pytest.mark.parametrize("only", [True, False])
def test_another_place(tmp_path, only):
    """Only models that may run nowhere else fail."""
    gpu = Gpu(tmp_path, count=2)
    settings = config(gpu)
    settings["models"]["second"]["devices"] = ["gpu0"] if only else ["gpu0", "gpu1"]
    with running(tmp_path, settings, env=gpu.env) as daemon:
        fake_nvml.write_script(gpu.script, gpus=[{**CARD, **LOST}, CARD], world=gpu.world)
        wait_until(lambda: devices(daemon)["gpu0"]["blocked"] == "lost: GPU is lost")
        response = daemon.chat("second")
        if only:
            failed(response, "device_lost")
        else:
            assert response.status_code == 200
            assert daemon.model("second")["device"] == "gpu1"
