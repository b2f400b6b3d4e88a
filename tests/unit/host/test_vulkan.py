"""GPUs that only Vulkan computes on, from a scripted /sys and /proc. The answers of Intel's drivers are scripted, too."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import pytest

from runtimes.device_kind import VULKAN
from supervisor.core.types import DeviceId, Generation, ModelId
from supervisor.host.memory import devices, vulkan
from supervisor.host.memory.amd import AmdDriver
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.machine import look
from supervisor.host.memory.memory import DriverUnavailableError, HolderPids
from supervisor.host.memory.vulkan import VulkanDriver, ask_regions
from tests.support.fake_amd import Amd

GIB = 1 << 30
ME = os.getpid()
A = (ModelId("a"), Generation(1))


class Intel:
    """The drivers' answers, by render node: total and free bytes, None for no memory, or an error."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[int, int] | OSError | None] = {}

    def __call__(self, node: Path, driver: str) -> tuple[int, int] | None:
        assert driver in ("xe", "i915")
        told = self.told[node.name]
        if isinstance(told, OSError):
            raise told
        return told


@pytest.fixture
def cards(tmp_path) -> Amd:
    found = Amd(tmp_path)
    (found.sys / "class/drm").mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture
def intel() -> Intel:
    return Intel()


@pytest.fixture
def driver(cards, intel, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n")

    def memory() -> HostMemory:
        return HostMemory(meminfo=meminfo, groups=())

    return lambda: VulkanDriver(cards.sys, cards.proc, memory, intel)


def holding(opened, loading: bool = True):
    return opened.read({A: HolderPids((DeviceId("vk0"),), (ME,), loading=loading)})


class TestFind:
    def test_none(self, tmp_path, driver):
        assert driver().find() == ()
        with pytest.raises(DriverUnavailableError):
            VulkanDriver(tmp_path / "none")

    def test_a_card_of_intel(self, cards, intel, driver):
        cards.intel(3)
        intel.told["renderD130"] = (12 * GIB, 12 * GIB)
        (one,) = driver().find()
        assert (one.index, one.uuid, one.name, one.total_mib) == (0, "0000:03:00.0", "Intel GPU e20b", 12288)
        assert (one.unusable, one.only_listed, one.pci) == (None, None, "0000:03:00.0")

    def test_one_in_a_processor(self, cards, intel, driver):
        cards.intel(1, driver="i915", device="0x46a6")
        intel.told["renderD128"] = None
        (one,) = driver().find()
        assert (one.unified, one.total_mib) == (True, int(32768 * 0.8))
        assert "list it under devices" in one.only_listed

    def test_one_that_does_not_tell(self, cards, intel, driver):
        cards.intel(1)
        intel.told["renderD128"] = OSError(errno.EINVAL, "Invalid argument")
        assert driver().find()[0].unusable == "can't be read: its driver xe doesn't tell its memory (Invalid argument)"

    def test_one_that_may_not_be_opened(self, cards, driver):
        cards.intel(1)
        (cards.dev / "dri" / "renderD128").unlink()
        assert driver().find()[0].unusable == f"can't be used: {cards.dev}/dri/renderD128 is not there"

    def test_amds_only_where_rocm_can_not(self, cards, driver):
        cards.gpu(1, vram_mib=16368, name="Radeon RX 7800 XT")
        assert driver().find() == ()
        (cards.dev / "kfd").unlink()
        (one,) = driver().find()
        assert (one.name, one.total_mib, one.unusable) == ("Radeon RX 7800 XT", 16368, None)
        assert "kfd" in AmdDriver(cards.sys, cards.proc).find()[0].unusable

    def test_the_machine_says_what_can_be_used(self, cards, monkeypatch):
        cards.gpu(1, vram_mib=16368, name="Radeon RX 7800 XT")
        cards.gpu(2, vram_mib=512, apu=True)
        (cards.dev / "kfd").unlink()
        monkeypatch.setenv("LLMUX_AMD_SYS", str(cards.sys))
        card, small = look(resolves=lambda _library: True).gpus
        assert (card.name, card.driver, card.unusable) == ("Radeon RX 7800 XT", "amdgpu", "")
        assert "list it under devices" in small.unusable


class TestRead:
    def test_what_the_driver_tells(self, cards, intel, driver):
        cards.intel(1)
        intel.told["renderD128"] = (12 * GIB, 9 * GIB)
        opened = driver().reader([(driver().find()[0], None)])
        assert opened.devices()[0].id == "vk0"
        assert opened.read({}).devices[0].free_mib == 9 * 1024

    @pytest.mark.parametrize(
        ("fields", "used"),
        [
            ("drm-total-vram0:\t900 MiB\ndrm-resident-vram0:\t800 MiB\ndrm-resident-gtt:\t5 MiB\n", 800),
            ("drm-total-local0:\t300 MiB\ndrm-resident-local0:\t200 MiB\ndrm-resident-local1:\t100 MiB\n", 300),
            ("drm-total-vram0:\t70 MiB\ndrm-shared-vram0:\t7 MiB\n", 70),
        ],
    )
    def test_what_a_worker_holds(self, cards, intel, driver, fields, used):
        """To processes without permission the driver shows no use."""
        cards.intel(1)
        intel.told["renderD128"] = (12 * GIB, 12 * GIB)
        file = cards.proc / f"{ME}/fdinfo/7"
        file.parent.mkdir(parents=True)
        file.write_text(f"drm-driver:\txe\ndrm-client-id:\t4\ndrm-pdev:\t0000:01:00.0\n{fields}")
        reading = holding(driver().reader([(driver().find()[0], None)]))
        assert [one.used_mib for one in reading.workers] == [used]
        assert reading.devices[0].free_mib == 12 * 1024 - used

    def test_one_that_stops_telling(self, cards, intel, driver):
        cards.intel(1)
        intel.told["renderD128"] = (12 * GIB, 9 * GIB)
        opened = driver().reader([(driver().find()[0], None)])
        opened.read({})
        intel.told["renderD128"] = OSError(errno.ENODEV, "No such device")
        (sample,) = opened.read({}).devices
        assert (sample.free_mib, sample.stale, sample.lost) == (9 * 1024, True, None)


class TestQuestions:
    """The kernel's formats. No GPU of Intel's is at hand: the kernel's side of the call is played here."""

    @pytest.mark.parametrize("driver", ["xe", "i915"])
    def test_asked(self, tmp_path, monkeypatch, driver):
        node = tmp_path / "renderD128"
        node.touch()
        own = (1, 0, 65536, 16 * GIB, 6 * GIB if driver == "xe" else 10 * GIB)
        regions = [(0, 0, 4096, 32 * GIB, 0), own]
        head = struct.pack("<II", 2, 0) if driver == "xe" else struct.pack("<IIII", 2, 0, 0, 0)
        answer = head + b"".join(struct.pack("<HHIQQ64x", *region) for region in regions)

        def put(address: int, content: bytes) -> None:
            vulkan.ctypes.memmove(address, content, len(content))

        def ioctl(_descriptor: int, request: int, asked: bytearray) -> int:
            if driver == "xe":
                assert (request, len(asked)) == (0xC0286440, 40)
                _, query, size, address, *_ = struct.unpack("<QIIQQQ", asked)
                assert query == 1
                if size == 0:
                    struct.pack_into("<I", asked, 12, len(answer))
                else:
                    assert size == len(answer)
                    put(address, answer)
            else:
                assert (request, len(asked)) == (0xC0106479, 16)
                items, _, address = struct.unpack("<IIQ", asked)
                assert items == 1
                item = vulkan.ctypes.string_at(address, 24)
                query, length, _, target = struct.unpack("<QiIQ", item)
                assert query == 4
                if length == 0:
                    put(address + 8, struct.pack("<i", len(answer)))
                else:
                    put(target, answer)
            return 0

        monkeypatch.setattr(fcntl, "ioctl", ioctl)
        assert ask_regions(node, driver) == (16 * GIB, 10 * GIB)

    @pytest.mark.parametrize("driver", ["xe", "i915"])
    def test_of_what_is_no_gpu(self, tmp_path, driver):
        node = tmp_path / "renderD128"
        node.touch()
        with pytest.raises(OSError, match="ioctl"):
            ask_regions(node, driver)


async def test_used_where_there_is_nothing_else(cards, monkeypatch):
    """`devices: auto`: after NVIDIA's and ROCm's, with main memory beside it."""
    cards.gpu(1, vram_mib=16368)
    (cards.dev / "kfd").unlink()
    monkeypatch.setenv("LLMUX_AMD_SYS", str(cards.sys))
    monkeypatch.setitem(devices.DRIVERS, devices.CUDA, _no_driver)
    opened = await devices.open_sampler()
    assert [one.id for one in opened.devices] == ["vk0", "host"]
    assert opened.devices[0].kind == VULKAN


def _no_driver():
    raise DriverUnavailableError("none")
