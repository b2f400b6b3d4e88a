from __future__ import annotations

import time

import pytest

from runtimes.device_kind import CUDA, HOST, DeviceWanted
from supervisor.errors import ConfigError
from supervisor.host.memory import devices
from supervisor.host.memory.devices import open_sampler


def ids(opened):
    return [device.id for device in opened.devices]


class TestAuto:
    """All NVIDIA GPUs if there are any, and host memory; notes name the omitted devices."""

    async def test_all_gpus(self, script):
        script(gpus=[{}, {"mig": True}, {}])
        opened = await open_sampler()
        assert ids(opened) == ["gpu0", "gpu2", "host"]
        assert opened.notes == ("GPU 1 (NVIDIA Fake 16 GiB) is in MIG mode, whose partitions are not supported",)
        sampled = await opened.sampler.sample({})
        assert [device.free_mib for device in sampled.devices][:2] == [16384, 16384]

    async def test_one_memory_is_one_device(self, script):
        script(gpus=[{"errors": {"nvmlDeviceGetMemoryInfo": 3}}])
        assert ids(await open_sampler()) == ["gpu0"]

    @pytest.mark.parametrize("keys", [{"init_error": 18}, {"gpus": []}, {"gpus": [{"mig": True}]}])
    async def test_host_memory_where_no_gpu_works(self, script, keys):
        script(**keys)
        opened = await open_sampler(margin_mib=7)
        assert ids(opened) == ["host"]
        assert opened.devices[0].margin_mib == 7
        assert opened.notes[-1].endswith("using host memory")

    async def test_host_memory_where_there_is_no_driver(self, script, monkeypatch):
        monkeypatch.delenv("LLMUX_FAKE_NVML")
        opened = await open_sampler()
        assert ids(opened) == ["host"]
        assert opened.notes == ("no NVIDIA GPU (NVML Shared Library Not Found); using host memory",)

    async def test_host_memory_where_the_driver_hangs(self, script, monkeypatch):
        monkeypatch.setattr(devices, "OPEN_TIMEOUT_S", 0.1)
        script(hang={"nvmlInit": 60})
        began = time.monotonic()
        opened = await open_sampler()
        assert ids(opened) == ["host"]
        assert "did not answer" in opened.notes[0]
        assert time.monotonic() - began < 30


class TestListed:
    """Exactly the listed devices, or all problems."""

    async def test_gpus_by_index_and_uuid_and_host_together(self, script):
        script(gpus=[{"uuid": "GPU-aa"}, {"uuid": "GPU-ab"}])
        wanted = [
            DeviceWanted(HOST, budget_mib=100, margin_mib=5),
            DeviceWanted(CUDA, uuid="GPU-ab", margin_mib=9),
            DeviceWanted(CUDA, index=0),
        ]
        opened = await open_sampler(wanted, margin_mib=6)
        assert [(d.id, d.margin_mib) for d in opened.devices] == [("gpu1", 9), ("gpu0", 6), ("host", 5)]
        assert len((await opened.sampler.sample({})).devices) == 3

    async def test_host_only_asks_no_driver(self, script):
        script(hang={"nvmlInit": 30})
        assert ids(await open_sampler([DeviceWanted(HOST, budget_mib=100)])) == ["host"]

    async def test_a_variable_that_names_them_is_told(self, script):
        script(gpus=[{}])
        with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES devices: no GPU has index 1; there are: 0"):
            await open_sampler([DeviceWanted(CUDA, index=1)], named_by="CUDA_VISIBLE_DEVICES")

    async def test_every_problem_at_once(self, script):
        script(gpus=[{"uuid": "GPU-aa"}, {"uuid": "GPU-ab", "mig": True}])
        wanted = [
            DeviceWanted(CUDA, index=7),
            DeviceWanted(CUDA, uuid="GPU-a"),
            DeviceWanted(CUDA, index=1),
            DeviceWanted(HOST),
            DeviceWanted(HOST),
        ]
        with pytest.raises(ConfigError) as caught:
            await open_sampler(wanted)
        missing, ambiguous, mig, twice = caught.value.problems
        assert "no GPU has index 7" in missing
        assert "GPU-aa" in missing
        assert "several GPUs match GPU-a" in ambiguous
        assert "MIG" in mig
        assert "twice" in twice

    async def test_the_same_gpu_twice(self, script):
        with pytest.raises(ConfigError, match="same GPU"):
            await open_sampler([DeviceWanted(CUDA, index=0), DeviceWanted(CUDA, uuid="GPU-0")])

    async def test_without_a_driver(self, script):
        script(init_error=18)
        with pytest.raises(ConfigError, match="version mismatch"):
            await open_sampler([DeviceWanted(CUDA, index=0)])
