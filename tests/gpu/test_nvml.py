"""What only a real NVIDIA GPU and its driver can show. Skipped where there is none."""

from __future__ import annotations

import os
import time

import pytest

from bench.gpu.measures import Outsider
from supervisor.core.types import Generation, ModelId
from supervisor.host.memory.devices import open_sampler
from supervisor.host.memory.memory import HolderPids
from supervisor.host.memory.nvml import DriverUnavailableError, NvmlSession

try:
    FOUND = [gpu for gpu in NvmlSession().find() if not gpu.unusable]
    REASON = "no NVIDIA GPU that can be used"
except DriverUnavailableError as error:
    FOUND, REASON = [], f"no NVIDIA GPU: {error}"

pytestmark = pytest.mark.skipif(not FOUND, reason=REASON)

A = (ModelId("a"), Generation(1))
TAKE_MIB = 1024


async def test_a_process_is_measured_and_its_memory_is_back_after_it():
    """Its use is told (by list or by the fall of free memory), and returns when it is killed."""
    opened = await open_sampler()
    gpu = opened.devices[0]
    before = (await opened.sampler.sample({})).devices[0]
    assert 0 < before.free_mib <= gpu.total_mib
    with Outsider(TAKE_MIB, env={"CUDA_VISIBLE_DEVICES": gpu.uuid}) as process:
        sampled = await opened.sampler.sample({A: HolderPids((gpu.id,), (process.pid,), loading=True)})
        print(gpu, before, sampled)
        (worker,) = sampled.workers
        assert TAKE_MIB <= worker.used_mib <= TAKE_MIB + 2048  # a context costs hundreds of MiB
        assert before.free_mib - sampled.devices[0].free_mib >= TAKE_MIB
    deadline = time.monotonic() + 30
    while (await opened.sampler.sample({})).devices[0].free_mib < before.free_mib - 256:
        assert time.monotonic() < deadline


async def test_measuring_creates_no_context():
    """The supervisor never appears among the GPU's processes."""
    opened = await open_sampler()
    await opened.sampler.sample({})
    session = NvmlSession()
    handle = session.nvml.nvmlDeviceGetHandleByIndex(0)
    assert os.getpid() not in [process.pid for process in session.nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    with open("/proc/self/maps") as maps:
        assert "libcuda.so" not in maps.read()
