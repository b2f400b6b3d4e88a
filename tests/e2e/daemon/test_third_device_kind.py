"""A kind of device that only `toy_daemon` knows: configured, found, measured, placed on, and shown to its workers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import daemon
from tests.support.daemon import Daemon, wait_until


class ToyDaemon(Daemon):
    program = ("-m", "tests.support.toy_daemon")


@pytest.fixture
def toys(tmp_path):
    """A daemon on two toys, of which the second has hardly any memory left."""
    memory = tmp_path / "memory.json"
    memory.write_text(json.dumps({"free_mib": [4000, 500]}))
    models = {
        "small": daemon.fake(vram_mib=400, devices=["toy1"]),
        "large": daemon.fake(vram_mib=3000),
        "wide": daemon.fake(vram_mib=800, gpus=2),
    }
    devices = [{"kind": "toy", "index": index, "margin_mib": 0} for index in (0, 1)]
    running = ToyDaemon(tmp_path, {"devices": devices, "models": models}, {"TOY_MEMORY": str(memory)})
    yield running
    if running.process is not None:
        running.kill()


def shown(site: Daemon) -> list[Any]:
    """The devices, as the admin API has them."""
    found: list[Any] = site.get("/v1/admin/gpu-memory").json()["devices"]
    return found


def environment(site: Daemon, name: str) -> dict[str, str]:
    pid = site.model(name)["worker"]["pid"]
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_workers_run_on_it(toys):
    toys.start()
    assert [(one["id"], one["kind"], one["name"]) for one in shown(toys)] == [
        ("toy0", "toy", "Abacus 0"),
        ("toy1", "toy", "Abacus 1"),
    ]
    wait_until(lambda: [one["free_mib"] for one in shown(toys)] == [4000, 500])
    for name, visible in (("small", "1"), ("large", "0"), ("wide", "0,1")):
        assert toys.chat(name).status_code == 200
        env = environment(toys, name)
        assert (env["TOY_VISIBLE_DEVICES"], env["TOY_ORDER"]) == (visible, "LEFT_TO_RIGHT")
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUDA_DEVICE_ORDER" not in env
        toys.post(f"/v1/admin/models/{name}/unload")
        toys.wait_state(name, "stopped")


def test_the_core_places_by_its_memory(toys):
    toys.start()
    assert toys.chat("small").status_code == 200
    assert toys.chat("large").status_code == 200
    leases = {one["id"]: [lease["model"] for lease in one["leases"]] for one in shown(toys)}
    assert leases == {"toy0": ["large"], "toy1": ["small"]}


def test_on_its_own_where_devices_are_auto(toys):
    """Every kind's devices are used; the notes say which kinds there are none of."""
    toys.config["devices"] = "auto"
    toys.env |= {"LLMUX_NVML_MODULE": str(Path(__file__).parents[2] / "support" / "fake_nvml.py")}
    toys.start()
    assert [one["id"] for one in shown(toys)] == ["toy0", "toy1", "host"]
    assert [line["message"] for line in toys.events("devices.note")] == [
        "no NVIDIA GPU (NVML Shared Library Not Found)"
    ]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([{"kind": "toy"}], 'a toy device is given by either "index" or "uuid"'),
        ([{"kind": "toy", "index": 7}], "no toy has index 7; there are: 0: Abacus 0"),
        ([{"kind": "tpu", "index": 0}], 'expected "host", "cuda", "rocm", "vulkan" or "toy"'),
    ],
)
def test_mistakes_are_told_as_for_any_kind(toys, devices, said):
    toys.config |= {"devices": devices, "models": {"any": daemon.fake()}}
    toys.start(wait=False)
    assert toys.process is not None
    assert toys.process.wait(60) != 0
    assert said in toys.log_text()
