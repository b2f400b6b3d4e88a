from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import ClassVar

import pytest

from runtimes.device_kind import CUDA, HOST, DeviceWanted
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId, Generation, ModelId
from supervisor.errors import ConfigError
from supervisor.host.memory.devices import open_sampler
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import DriverUnavailableError, HolderPids
from supervisor.host.memory.nvml import NvmlReader, NvmlSession

GPU0 = DeviceId("gpu0")
LOST = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates")
A = (ModelId("a"), Generation(1))
INIT_ERRORS = {"library missing": 12, "version mismatch": 18, "driver not loaded": 9}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_reader(clock):
    def build():
        session = NvmlSession()
        return NvmlReader(session, [(gpu, None) for gpu in session.find() if not gpu.unusable], clock=clock)

    return build


def holder(*roots, loading=True):
    return {A: HolderPids((GPU0,), roots, loading=loading)}


def used(reading):
    return [worker.used_mib for worker in reading.workers]


def device(reading):
    (sample,) = reading.devices
    return sample


class TestBusy:
    """A GPU's utilisation, if its driver shows it."""

    def test_of_those_that_tell(self, script, open_reader):
        script(gpus=[{"busy": 67}, {}, {"busy": 0}])
        assert open_reader().read({}).busy == {"gpu0": 0.67, "gpu2": 0.0}

    def test_not_of_one_that_is_lost(self, script, open_reader):
        script(gpus=[{"busy": 67}])
        reader = open_reader()
        script(gpus=[{"busy": 67}], errors=dict.fromkeys(LOST, 15))
        assert reader.read({}).busy == {}


class TestUnified:
    """A GPU that computes in main memory is one device with one budget of it.

    The figures are those of a DGX Spark: driver 580.173.02 knows no memory of its GB10, but what each process holds there.
    """

    GB10: ClassVar = {"name": "NVIDIA GB10", "errors": {"nvmlDeviceGetMemoryInfo": 3}, "capability": [12, 1]}
    TOTAL_KIB, AVAILABLE_KIB = 127600748, 118566368

    @pytest.fixture
    def spark(self, script, tmp_path, clock):
        """Opens a reader; its `write` scripts the available memory."""
        meminfo = tmp_path / "meminfo"

        def write(available_kib=self.AVAILABLE_KIB):
            meminfo.write_text(f"MemTotal: {self.TOTAL_KIB} kB\nMemAvailable: {available_kib} kB\n")

        def opened():
            session = NvmlSession(lambda: HostMemory(meminfo=meminfo, groups=()))
            return NvmlReader(session, [(gpu, None) for gpu in session.find() if not gpu.unusable], clock=clock)

        write()
        opened.write = write
        script(gpus=[self.GB10], driver="580.173.02")
        return opened

    def test_facts(self, spark):
        (info,) = spark().devices()
        assert (info.id, info.kind, info.name, info.capability) == (GPU0, CUDA, "NVIDIA GB10", (12, 1))
        assert info.total_mib == self.TOTAL_KIB * 8 // 10 // 1024  # as of host memory: the rest is the system's
        assert info.assignment.uuid == "GPU-00000000-fake"

    def test_free_is_what_the_machine_has(self, spark):
        reader = spark()
        total = reader.devices()[0].total_mib
        assert device(reader.read({})) == DeviceSample(GPU0, total, outside_mib=0)
        spark.write(50 << 20)
        assert device(reader.read({})) == DeviceSample(GPU0, 51200, outside_mib=total - 51200)

    def test_a_worker_takes_memory_on_both_sides(self, script, spark):
        reader = spark()
        script(gpus=[{**self.GB10, "processes": [{"pid": os.getpid(), "mib": 30000}, {"pid": 1, "mib": 43}]}])
        reading = reader.read(holder(os.getpid()))
        (mib,) = used(reading)
        assert 30005 < mib < 34000  # and this process's own memory
        assert device(reading).free_mib == reader.devices()[0].total_mib - mib

    def test_without_a_list_of_processes(self, script, spark):
        """As on a Jetson: the fall of available memory is the worker's use."""
        reader = spark()
        script(gpus=[{**self.GB10, "list": "error"}])
        reader.read({})
        spark.write(self.AVAILABLE_KIB - (9000 << 10))
        assert used(reader.read(holder(os.getpid()))) == [9000]

    def test_lost(self, script, spark):
        reader = spark()
        free = device(reader.read({})).free_mib
        script(gpus=[{**self.GB10, "errors": {"nvmlDeviceGetUUID": 15}}])
        assert device(reader.read({})) == DeviceSample(GPU0, free, stale=True, lost="GPU is lost")

    def test_no_figures_from_the_kernel(self, spark, tmp_path):
        reader = spark()
        (tmp_path / "meminfo").write_text("MemTotal: 127600748 kB\n")
        with pytest.raises(OSError, match="no MemAvailable"):
            reader.read({})

    async def test_it_is_used_unasked_and_is_no_other_device_than_host_memory(self, script):
        script(gpus=[self.GB10])
        assert [found.id for found in (await open_sampler()).devices] == ["gpu0"]
        with pytest.raises(
            ConfigError, match=r"GPU 0 \(NVIDIA GB10\) and host memory are one memory: list one of them"
        ):
            await open_sampler([DeviceWanted(CUDA, index=0), DeviceWanted(HOST)])


class TestDevices:
    """The driver's facts about its GPUs become device facts."""

    def test_facts_of_a_gpu(self, script, open_reader):
        script(gpus=[{"total_mib": 16384, "reserved_mib": 400, "uuid": "GPU-x", "name": "RTX"}], driver="590.48")
        (info,) = open_reader().devices()
        assert (info.id, info.kind, info.index, info.uuid, info.name) == (GPU0, CUDA, 0, "GPU-x", "RTX")
        assert (info.total_mib, info.margin_mib, info.driver) == (16384 - 400, 512, "590.48")
        assert not info.spec.returns_at_exit

    def test_the_generation_reaches_the_adapters(self, script, open_reader):
        """Runtimes decide by these facts on another program or setting."""
        script(gpus=[{"capability": [12, 0]}, {}])
        new, silent = (info.assignment.capability for info in open_reader().devices())
        assert (new, silent) == ((12, 0), None)

    def test_the_margin_is_three_percent_of_a_large_gpu(self, script, open_reader):
        script(gpus=[{"total_mib": 81920}])
        (info,) = open_reader().devices()
        assert info.margin_mib == 2457

    def test_a_driver_without_version_2_of_memory_info_is_read_by_version_1(self, script, open_reader, monkeypatch):
        session = NvmlSession()
        version_1 = session.nvml.nvmlDeviceGetMemoryInfo

        def only_version_1(handle, version=None):
            if version is not None:
                raise session.nvml.NVMLError(13)
            return version_1(handle)

        monkeypatch.setattr(session.nvml, "nvmlDeviceGetMemoryInfo", only_version_1)
        assert [gpu.total_mib for gpu in session.find()] == [16384]

    def test_mig_and_broken_gpus_are_left_out_with_a_reason(self, script):
        script(
            gpus=[
                {"mig": True},
                {"errors": {"nvmlDeviceGetMemoryInfo": 15}},
                {"errors": {"nvmlDeviceGetHandleByIndex": 15}},
                {"mig": False},
            ]
        )
        reasons = [gpu.unusable for gpu in NvmlSession().find()]
        assert "MIG" in reasons[0]
        assert reasons[1] == reasons[2] == "can't be read: GPU is lost"
        assert reasons[3] is None

    @pytest.mark.parametrize("error", INIT_ERRORS.values(), ids=INIT_ERRORS.keys())
    def test_without_a_working_driver_it_says_so(self, script, error):
        script(init_error=error)
        with pytest.raises(DriverUnavailableError, match=r"."):
            NvmlSession()


class TestAttribution:
    """Each process's use, if the process list can be trusted."""

    def test_a_worker_is_its_whole_tree_and_the_rest_is_outside(self, script, open_reader, spawn):
        parent = spawn(
            "import subprocess, sys;"
            "p = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import sys; sys.stdin.read()']);"
            "print(p.pid, flush=True); p.wait()"
        )
        child = int(parent.stdout.readline())
        strangers = [{"pid": 1, "mib": 700}, {"pid": os.getpid(), "mib": 30, "graphics": True}]
        script(gpus=[{"processes": [{"pid": parent.pid, "mib": 100}, {"pid": child, "mib": 5000}, *strangers]}])
        reading = open_reader().read(holder(parent.pid))
        assert device(reading) == DeviceSample(GPU0, 16384 - 5830, outside_mib=730)
        assert reading.workers == (WorkerSample(*A, GPU0, 5100),)

    def test_a_process_that_computes_and_draws_counts_once(self, script, open_reader, spawn):
        pid = spawn().pid
        both = [{"pid": pid, "mib": 300}, {"pid": pid, "mib": 300, "graphics": True}]
        script(gpus=[{"processes": both}])
        assert used(open_reader().read(holder(pid))) == [300]

    def test_a_worker_without_a_context_takes_nothing_once_the_list_has_proven_itself(self, script, open_reader, spawn):
        first, second = spawn().pid, spawn().pid
        script(gpus=[{"processes": [{"pid": first, "mib": 300}]}])
        both = {
            A: HolderPids((GPU0,), (first,), loading=False),
            (ModelId("b"), Generation(1)): HolderPids((GPU0,), (second,), loading=True),
        }
        assert used(open_reader().read(both)) == [300, 0]

    def test_a_compute_only_card_has_no_graphics_list(self, script, open_reader, spawn):
        pid = spawn().pid
        no_graphics = {"nvmlDeviceGetGraphicsRunningProcesses": 3}
        script(gpus=[{"processes": [{"pid": pid, "mib": 300}], "errors": no_graphics}])
        reading = open_reader().read(holder(pid))
        assert (used(reading), device(reading).outside_mib) == ([300], 0)

    def test_holders_on_other_devices_are_not_ours(self, script, open_reader):
        assert open_reader().read({A: HolderPids((DeviceId("host"),), (1,), loading=False)}).workers == ()

    def test_with_nobody_of_ours_all_of_the_list_is_outside(self, script, open_reader):
        script(gpus=[{"processes": [{"pid": 99_999_999, "mib": 4000}]}])
        assert device(open_reader().read({})).outside_mib == 4000


class TestWithoutAProcessList:
    """Fault 20: if the list hides processes, a loading worker's use is the fall of free memory and outside is unknown."""

    @pytest.mark.parametrize("how", ["empty", "no_sizes", "host_pids", "error"])
    def test_the_use_is_the_fall_of_free_memory(self, script, open_reader, spawn, how):
        gpu = {"total_mib": 16384, "reserved_mib": 300, "processes": [{"pid": 1, "mib": 1000}], "list": how}
        script(gpus=[gpu])
        reader = open_reader()
        before = reader.read({})
        worker = spawn(FAKE_VRAM_MIB=9000, FAKE_VRAM_WORLD=script.world)
        reading = reader.read(holder(worker.pid))
        assert device(before).free_mib == 15084
        assert device(reading) == DeviceSample(GPU0, 6084, outside_mib=None)
        assert used(reading) == [9000]
        assert used(reader.read(holder(worker.pid, loading=False))) == [9000]

    def test_without_a_baseline_the_use_is_unknown(self, script, open_reader, spawn):
        script(gpus=[{"list": "empty"}])
        worker = spawn(FAKE_VRAM_MIB=9000, FAKE_VRAM_WORLD=script.world)
        assert used(open_reader().read(holder(worker.pid))) == [None]

    def test_a_list_that_hides_strangers_leaves_outside_unknown_but_ours_known(self, script, open_reader, spawn):
        worker = spawn(FAKE_VRAM_MIB=2000, FAKE_VRAM_WORLD=script.world)
        script(gpus=[{"processes": []}])
        reader = open_reader()
        script(gpus=[{"total_mib": 8192, "processes": []}])  # 8 GiB of a process that the list hides
        reading = reader.read(holder(worker.pid))
        assert (used(reading), device(reading).outside_mib) == ([2000], None)


class TestMemoryThatReturnsLate:
    """Fault 17: free memory is the device's figure, even after a process's end."""

    def test_free_rises_only_when_the_driver_shows_it(self, script, open_reader, spawn):
        script(return_after_s=None)
        reader = open_reader()
        worker = spawn(FAKE_VRAM_MIB=9000, FAKE_VRAM_WORLD=script.world)
        assert device(reader.read(holder(worker.pid))).free_mib == 7384
        worker.kill()
        worker.wait()
        late = device(reader.read({}))
        assert (late.free_mib, late.outside_mib) == (7384, None)
        script(return_after_s=0)
        assert device(reader.read({})) == DeviceSample(GPU0, 16384, outside_mib=0)

    def test_after_a_while(self, script, open_reader, spawn):
        script(return_after_s=0.3)
        reader = open_reader()
        worker = spawn(FAKE_VRAM_MIB=9000, FAKE_VRAM_WORLD=script.world)
        reader.read(holder(worker.pid))
        worker.kill()
        worker.wait()
        died = time.monotonic()
        while (free := device(reader.read({})).free_mib) != 16384:
            assert free == 7384
            assert time.monotonic() < died + 20
        assert time.monotonic() - died >= 0.25


class TestALostDriver:
    """Fault 18: the last values, stale, and new attempts with backoff until it is back."""

    @pytest.mark.parametrize("error", [1, 10, 15, 18, 999])
    def test_the_last_values_are_kept_and_marked(self, script, open_reader, spawn, error):
        gpu = {"processes": [{"pid": (pid := spawn().pid), "mib": 3000}]}
        script(gpus=[gpu])
        reader = open_reader()
        reader.read(holder(pid))
        script(gpus=[{**gpu, "errors": {"nvmlDeviceGetMemoryInfo": error}}])
        reading = reader.read(holder(pid))
        lost = {15: "GPU is lost"}.get(error)  # the others may pass
        assert device(reading) == DeviceSample(GPU0, 13384, stale=True, lost=lost)
        assert used(reading) == [3000]
        script(gpus=[gpu])
        assert device(reader.read(holder(pid))) == DeviceSample(GPU0, 13384, outside_mib=0)

    def test_one_lost_gpu_leaves_the_others_readable(self, script, open_reader):
        script(gpus=[{}, {}])
        reader = open_reader()
        script(gpus=[{"errors": {"nvmlDeviceGetMemoryInfo": 15}}, {}])
        assert [sample.stale for sample in reader.read({}).devices] == [True, False]

    def test_nothing_was_ever_read(self, script, open_reader):
        reader = open_reader()
        script(errors={"nvmlDeviceGetMemoryInfo": 15})
        assert device(reader.read({})) == DeviceSample(GPU0, 0, stale=True, lost="GPU is lost")

    def test_it_is_initialised_anew_with_growing_pauses(self, script, open_reader, clock):
        reader = open_reader()
        nvml = reader._nvml
        reader.read({})
        nvml.nvmlShutdown()
        attempts = []
        script(init_error=999)
        for _ in range(300):
            clock.now += 0.5
            before = nvml._state.attempts
            assert device(reader.read({})).stale
            if nvml._state.attempts > before:
                attempts.append(clock.now)
        pauses = [later - earlier for earlier, later in pairwise(attempts)]
        assert pauses == [2, 4, 8, 16, 32, 60]

        script()
        clock.now += 60
        assert not device(reader.read({})).stale

    def test_a_gpu_that_changed_its_index_is_found_by_its_uuid(self, script, open_reader, clock):
        script(gpus=[{"uuid": "GPU-a", "total_mib": 8192}, {"uuid": "GPU-b", "total_mib": 4096}])
        reader = open_reader()
        reader._nvml.nvmlShutdown()
        reader.read({})
        script(gpus=[{"uuid": "GPU-b", "total_mib": 4096}, {"uuid": "GPU-a", "total_mib": 8192}])
        clock.now += 2
        assert [sample.free_mib for sample in reader.read({}).devices] == [8192, 4096]
