"""AMD's GPUs from a scripted /sys and /proc, the worker being a real process."""

from __future__ import annotations

import os

import pytest

from runtimes.device_kind import CUDA, HOST, ROCM, DeviceAssignment, DeviceWanted, visibility
from supervisor.core.types import DeviceId, Generation, ModelId
from supervisor.errors import ConfigError
from supervisor.host.memory import devices
from supervisor.host.memory.amd import AmdDriver
from supervisor.host.memory.devices import open_sampler
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import DriverUnavailableError, HolderPids
from tests.support.fake_amd import Amd

AMD0 = DeviceId("amd0")
A, B = (ModelId("a"), Generation(1)), (ModelId("b"), Generation(1))
ME = os.getpid()
MEMINFO = "MemTotal: 131072000 kB\nMemAvailable: {available} kB\n"
HALO = {"vram_mib": 512, "gtt_mib": 63488, "apu": True, "name": "AMD Radeon 8060S"}
"""Strix Halo as delivered: 128 GB, of which half a GiB is put aside and half the rest may be the GPU's."""


@pytest.fixture
def amd(tmp_path):
    return Amd(tmp_path)


@pytest.fixture
def host(tmp_path):
    """Scripts main memory of 128000 MiB with `available_mib`."""
    file = tmp_path / "meminfo"

    def write(available_mib: int = 120000) -> None:
        file.write_text(MEMINFO.format(available=available_mib * 1024))

    write()
    write.memory = lambda: HostMemory(meminfo=file, groups=())
    return write


@pytest.fixture
def driver(amd, host):
    return lambda: AmdDriver(amd.sys, amd.proc, host.memory)


@pytest.fixture
def reader(driver):
    """A reader of all usable GPUs."""

    def opened():
        found = driver()
        return found.reader([(one, None) for one in found.find() if not one.unusable])

    return opened


def holder(pid=ME, loading=True, **others):
    return {A: HolderPids((AMD0,), (pid,), loading=loading), **others}


def used(reading):
    return [worker.used_mib for worker in reading.workers]


class TestFind:
    """ROCm's GPUs, in ROCm's order."""

    def test_facts(self, amd, reader):
        amd.gpu(1, vram_mib=24560, name="Radeon RX 7900 XTX", unique=0xC0FFEE)
        amd.gpu(2, vram_mib=16368)
        first, second = reader().devices()
        assert (first.id, first.kind, first.index, first.name) == ("amd0", ROCM, 0, "Radeon RX 7900 XTX")
        assert (first.uuid, first.total_mib, first.margin_mib) == ("GPU-0000000000c0ffee", 24560, 736)
        assert (second.id, second.uuid, second.name, second.total_mib) == ("amd1", None, "AMD gfx2", 16368)

    def test_the_tenth_comes_after_the_second(self, amd, driver):
        for place in (10, 2, 1):
            amd.gpu(place, vram_mib=1000 + place)
        assert [one.total_mib for one in driver().find()] == [1001, 1002, 1010]

    def test_no_driver(self, tmp_path):
        with pytest.raises(DriverUnavailableError, match="/sys/class/kfd"):
            AmdDriver(tmp_path / "none")

    def test_one_without_figures(self, amd, driver):
        (amd.gpu(1, vram_mib=8176) / "mem_info_vram_total").unlink()
        (found,) = driver().find()
        assert found.unusable == "can't be read: No such file or directory"

    @pytest.mark.parametrize("name", ["kfd", "dri/renderD128"])
    def test_one_that_workers_cant_open(self, amd, driver, monkeypatch, name):
        """In a container with /sys but without the devices, or for a user outside the devices' group."""
        amd.gpu(1, vram_mib=16368)
        monkeypatch.setattr("os.access", lambda file, mode: file != amd.dev / name)
        (found,) = driver().find()
        assert found.unusable == f"can't be used: {amd.dev / name} may not be opened by this user"
        monkeypatch.undo()
        (amd.dev / name).unlink()
        (found,) = driver().find()
        assert found.unusable == f"can't be used: {amd.dev / name} is not there"

    def test_a_small_apu_that_nobody_wants_is_no_news(self, amd, driver):
        """Most desktops have a small APU, and their users are not in the group for it."""
        amd.gpu(1, vram_mib=512, apu=True)
        (amd.dev / "kfd").unlink()
        (found,) = driver().find()
        assert found.unusable
        assert found.only_listed == "computes in main memory; list it under devices to use it"

    def test_a_folder_that_cant_be_read(self, amd, driver, monkeypatch):
        """A container may hide it."""
        opened = driver()
        monkeypatch.setattr(type(amd.nodes), "iterdir", lambda _: (_ for _ in ()).throw(PermissionError(13, "denied")))
        with pytest.raises(DriverUnavailableError, match="/sys/class/kfd can't be read: denied"):
            opened.find()

    def test_one_with_nonsense(self, amd, driver):
        (amd.gpu(1, vram_mib=8176) / "mem_info_gtt_total").write_text("many\n")
        (found,) = driver().find()
        assert found.unusable == "can't be read: mem_info_gtt_total holds no number"


class TestRead:
    """Free memory from the card's figures, a worker's use from its descriptors."""

    def test_free(self, amd, reader):
        amd.gpu(1, vram_mib=16368)
        amd.take(1, vram_mib=1000, gtt_mib=700)
        reading = reader().read({})
        assert [(one.free_mib, one.stale) for one in reading.devices] == [(15368, False)]
        assert reading.busy == {AMD0: 0.25}

    def test_a_worker(self, amd, reader):
        """Two descriptors are one client; another GPU's doesn't count here."""
        amd.gpu(1, vram_mib=16368)
        amd.gpu(2, vram_mib=16368)
        amd.client(ME, 7, 1, 31, vram=3 * 1024 * 1024, gtt=5000)
        amd.client(ME, 8, 1, 31, vram=3 * 1024 * 1024, gtt=5000)
        amd.client(ME, 9, 1, 32, vram=1)
        amd.client(ME, 10, 2, 33, vram=999)
        assert used(reader().read(holder())) == [3073]

    def test_other_gpus_do_not_count(self, amd, reader):
        amd.gpu(1, vram_mib=16368)
        amd.client(ME, 7, 1, 31, vram=2048)
        amd.client(ME, 8, 2, 32, vram=2048)
        assert used(reader().read(holder())) == [2]

    def test_without_descriptors_by_the_fall_of_free_memory(self, amd, reader):
        """As for a container's processes, with descriptors of another user."""
        amd.gpu(1, vram_mib=16368)
        opened = reader()
        opened.read({})
        amd.take(1, vram_mib=4000)
        assert used(opened.read(holder())) == [4000]

    def test_a_figure_that_cant_be(self, amd, reader):
        amd.gpu(1, vram_mib=1000)
        opened = reader()
        opened.read({})
        amd.take(1, vram_mib=2000)
        (device,) = opened.read({}).devices
        assert (device.free_mib, device.stale, device.lost) == (1000, True, None)
        amd.take(1, vram_mib=400)
        (device,) = opened.read({}).devices
        assert (device.free_mib, device.stale) == (600, False)

    def test_a_card_that_vanishes(self, amd, reader):
        """The other one is read on; the lost one keeps its last figure, and comes back."""
        amd.gpu(1, vram_mib=1000)
        amd.gpu(2, vram_mib=2000)
        opened = reader()
        opened.read({})
        amd.lose(1)
        first, second = opened.read({}).devices
        assert (first.free_mib, first.stale, first.lost) == (1000, True, "its folder in /sys is gone")
        assert (second.free_mib, second.stale) == (2000, False)
        amd.gpu(1, vram_mib=1000)
        assert [one.stale for one in opened.read({}).devices] == [False, False]

    def test_a_file_that_cant_be_read(self, amd, reader):
        folder = amd.gpu(1, vram_mib=1000)
        opened = reader()
        (folder / "mem_info_vram_used").unlink()
        (device,) = opened.read({}).devices
        assert (device.free_mib, device.stale, device.lost) == (0, True, None)
        (folder / "gpu_busy_percent").unlink()
        assert opened.read({}).busy == {}


class TestApu:
    """An APU's memory is the machine's: one device with one budget. Figures of a Strix Halo with 128 GB."""

    def test_as_delivered(self, amd, reader):
        amd.gpu(1, **HALO)
        (info,) = reader().devices()
        assert info.total_mib == 63488  # the driver's limit for mapping, less than 80 % of the machine

    def test_a_larger_window_than_the_budget(self, amd, reader):
        amd.gpu(1, **{**HALO, "gtt_mib": 120000})
        assert reader().devices()[0].total_mib == 102400

    def test_memory_put_aside_is_its_own(self, amd, reader, host):
        """With 96 GB for the GPU in the firmware, the kernel has the rest, and the two don't mix."""
        amd.gpu(1, **{**HALO, "vram_mib": 98304, "gtt_mib": 15600})
        amd.take(1, vram_mib=50000)
        host(1000)
        opened = reader()
        assert opened.devices()[0].total_mib == 98304
        assert opened.read({}).devices[0].free_mib == 48304

    def test_the_host_takes_from_it(self, amd, reader, host):
        amd.gpu(1, **HALO)
        amd.take(1, gtt_mib=3000)
        opened = reader()
        (device,) = opened.read({}).devices
        assert (device.free_mib, device.outside_mib) == (60488, 3000)
        host(20000)
        (device,) = opened.read({}).devices
        assert (device.free_mib, device.outside_mib) == (20000, 43488)

    def test_a_worker_takes_both(self, amd, reader):
        """A worker's use is its memory on the GPU and its own: this test's process has some tens of MiB."""
        amd.gpu(1, **HALO)
        opened = reader()
        (plain,) = used(opened.read(holder(loading=False)))
        amd.client(ME, 7, 1, 31, vram=300 * 1024, gtt=20000 * 1024)
        reading = opened.read(holder())
        (with_gpu,) = used(reading)
        assert plain is None  # nothing tells: it was there from the start
        assert 20300 + 5 < with_gpu < 20300 + 4000
        assert reading.devices[0].free_mib <= 63488 - with_gpu


class TestChoice:
    """The choice of GPUs, and a worker's visible devices."""

    @pytest.fixture(autouse=True)
    def scripted(self, driver, script, monkeypatch):
        monkeypatch.setitem(devices.DRIVERS, ROCM, driver)
        script(init_error=9)

    async def test_all_cards_where_nothing_is_listed(self, amd):
        amd.gpu(1, vram_mib=16368)
        amd.gpu(2, vram_mib=512, gtt_mib=15000, apu=True, name="Radeon Graphics")
        opened = await open_sampler()
        assert [device.id for device in opened.devices] == ["amd0", "host"]
        assert opened.notes[-1] == "GPU 1 (Radeon Graphics) computes in main memory; list it under devices to use it"

    async def test_a_small_apu_leaves_host_memory(self, amd):
        amd.gpu(1, vram_mib=512, gtt_mib=15000, apu=True)
        opened = await open_sampler()
        assert [device.id for device in opened.devices] == ["host"]

    async def test_beside_nvidias_only_where_listed(self, amd, script):
        script(gpus=[{}])
        amd.gpu(1, vram_mib=16368)
        assert [device.id for device in (await open_sampler()).devices] == ["gpu0", "host"]
        listed = [DeviceWanted(CUDA, index=0), DeviceWanted(ROCM, index=0)]
        assert [device.id for device in (await open_sampler(listed)).devices] == ["gpu0", "amd0"]

    async def test_a_listed_apu(self, amd):
        amd.gpu(1, **HALO)
        opened = await open_sampler([DeviceWanted(ROCM, index=0)])
        sampled = await opened.sampler.sample({})
        assert [(one.id, one.free_mib) for one in sampled.devices] == [("amd0", 63488)]

    async def test_host_memory_is_not_another_device(self, amd):
        amd.gpu(1, **HALO)
        with pytest.raises(ConfigError, match=r"GPU 0 \(AMD Radeon 8060S\) and host memory are one memory"):
            await open_sampler([DeviceWanted(ROCM, index=0), DeviceWanted(HOST)])

    async def test_a_uuid(self, amd):
        amd.gpu(1, vram_mib=1000)
        amd.gpu(2, vram_mib=2000, unique=0xABCDEF)
        opened = await open_sampler([DeviceWanted(ROCM, uuid="GPU-0000000000abc")])
        assert [device.id for device in opened.devices] == ["amd1"]

    def test_what_a_worker_sees(self):
        mine = DeviceAssignment("amd1", ROCM, 1)
        assert visibility([mine]) == {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "1"}
        named = DeviceAssignment("amd1", ROCM, 1, "GPU-0000000000abcdef")
        assert visibility([named])["ROCR_VISIBLE_DEVICES"] == "GPU-0000000000abcdef"
        assert visibility([DeviceAssignment("gpu0", CUDA, 0)])["ROCR_VISIBLE_DEVICES"] == ""
