"""GPUs that compute only by Vulkan here: Intel's, and AMD's without access to /dev/kfd. Read from the kernel's drivers.

    /sys/class/drm/renderDM/device/    the PCI device; `driver` leads to amdgpu, i915 or xe
    amdgpu                             mem_info_vram_*, as with ROCm
    i915, xe                           an ioctl on /dev/dri/renderDM: the regions of memory that the GPU has

Intel's drivers show all processes the size of a region, but its use only to those with CAP_PERFMON. Without it, free memory is
the size minus the memory of our workers, and the use of other programs is unknown.

A GPU without memory of its own computes in main memory. It is one device with one budget, and used only where the
configuration lists it, since most processors have such a GPU. Vulkan's own numbering depends on its loader, so devices are
numbered by their addresses on the PCI bus.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from runtimes.device_kind import VULKAN
from supervisor.host.memory.amd import LISTED, found_at
from supervisor.host.memory.drm import PROC, Card, DrmReader, closed, sys_folder, text
from supervisor.host.memory.host_memory import BUDGET_SHARE, HostMemory
from supervisor.host.memory.memory import MIB, DeviceFound, DriverUnavailableError

Regions = Callable[[Path, str], "tuple[int, int] | None"]
"""Given a render node and its driver: the total and free bytes of the GPU's own memory; None: it has none. Raises OSError."""

INTEL: Final = ("i915", "xe")

# From the kernel's include/uapi/drm: xe_drm.h, i915_drm.h.
_XE_QUERY: Final = 0xC028_6440  # of 40 bytes: extensions, query, size, address, two reserved
_XE_REGIONS: Final = 1
_I915_QUERY: Final = 0xC010_6479  # of 16 bytes: how many items, flags, their address
_I915_REGIONS: Final = 4
_XE_HEAD, _I915_HEAD = 8, 16
_REGION: Final = struct.Struct("<HHIQQ64x")  # class, instance, smallest page, size, used (xe) or left (i915)
_OWN: Final = 1  # the class of the GPU's own memory
_MOST: Final = 1 << 16


class VulkanDriver:
    """The kernel's drivers. Raises DriverUnavailableError if there is none."""

    def __init__(
        self,
        sys: Path | None = None,
        proc: Path = PROC,
        host: Callable[[], HostMemory] = HostMemory,
        regions: Regions | None = None,
    ) -> None:
        self._sys, self._proc, self._host = sys or sys_folder(), proc, host
        self._dev = self._sys.with_name("dev")
        self._regions = regions or ask_regions
        if not os.path.isdir(self._sys / "class/drm"):  # noqa: PTH112  # any failure to read it counts as no driver
            raise DriverUnavailableError("the kernel shows none (/sys/class/drm)")

    def find(self) -> tuple[DeviceFound, ...]:
        """See `Driver`."""
        try:
            renders = sorted(
                (self._sys / "class/drm").glob("renderD*"), key=lambda node: (node / "device").resolve().name
            )
        except OSError as error:
            raise DriverUnavailableError(f"/sys/class/drm can't be read: {error.strerror}") from error
        known = [(render, driver) for render in renders if (driver := self._driver_of(render / "device"))]
        return tuple(self._inspect(index, *one) for index, one in enumerate(known))

    def reader(self, devices: Sequence[tuple[DeviceFound, int | None]]) -> DrmReader:
        return DrmReader(VULKAN, devices, self._proc, self._host)

    def _driver_of(self, folder: Path) -> str | None:
        """The driver of a GPU that this module handles; None: the GPU belongs to another kind of device."""
        driver = (folder / "driver").resolve().name
        if driver == "amdgpu":
            return driver if closed(self._dev / "kfd") is not None else None
        return driver if driver in INTEL else None

    def _inspect(self, index: int, render: Path, driver: str) -> DeviceFound:
        folder, node = render / "device", self._dev / "dri" / render.name
        address, unusable = folder.resolve().name, closed(node)
        if driver == "amdgpu":
            name = text(folder / "product_name") or "AMD GPU"
            return found_at(folder, index, address, name, unusable, self._host)
        name = f"Intel GPU {text(folder / 'device').removeprefix('0x')}".rstrip()
        if unusable is not None:
            return DeviceFound(index, address, name, unusable=unusable, pci=address)
        try:
            regions = self._regions(node, driver)
        except OSError as error:
            why = f"can't be read: its driver {driver} doesn't tell its memory ({error.strerror or error})"
            return DeviceFound(index, address, name, unusable=why, pci=address)
        if regions is None:
            pool_mib = int(self._host().physical_mib * BUDGET_SHARE)
            card = Card(folder, address, lambda _ours: None, pool_mib)
            return DeviceFound(index, address, name, pool_mib, card, only_listed=LISTED, unified=True, pci=address)
        card = Card(folder, address, partial(self._free_bytes, node, driver))
        return DeviceFound(index, address, name, regions[0] // MIB, card, pci=address)

    def _free_bytes(self, node: Path, driver: str, own_bytes: int) -> int:
        regions = self._regions(node, driver)
        if regions is None:
            raise OSError("it has no memory of its own any more")
        return max(0, min(regions[1], regions[0] - own_bytes))


def ask_regions(node: Path, driver: str) -> tuple[int, int] | None:
    """See `Regions`. Blocks while the GPU wakes up."""
    descriptor = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        answer = (_ask_xe if driver == "xe" else _ask_i915)(descriptor)
    finally:
        os.close(descriptor)
    (count,) = struct.unpack_from("<I", answer)
    found = (
        _REGION.unpack_from(answer, at)
        for at in range(_XE_HEAD if driver == "xe" else _I915_HEAD, len(answer) - _REGION.size + 1, _REGION.size)
    )
    own = [
        (size, size - third if driver == "xe" else third)
        for kind, _, _, size, third in (*found,)[:count]
        if kind == _OWN
    ]
    return (sum(size for size, _ in own), sum(left for _, left in own)) if own else None


def _ask_xe(descriptor: int) -> bytes:
    """Ask xe for its memory regions: first for the answer's length, then for the answer."""
    query = bytearray(struct.pack("<QIIQQQ", 0, _XE_REGIONS, 0, 0, 0, 0))
    fcntl.ioctl(descriptor, _XE_QUERY, query)
    buffer = ctypes.create_string_buffer(_check_length(struct.unpack_from("<I", query, 12)[0]))
    query = bytearray(struct.pack("<QIIQQQ", 0, _XE_REGIONS, len(buffer), ctypes.addressof(buffer), 0, 0))
    fcntl.ioctl(descriptor, _XE_QUERY, query)
    return buffer.raw


def _ask_i915(descriptor: int) -> bytes:
    length = 0
    buffer = ctypes.create_string_buffer(0)
    for _ in range(2):  # first the answer's length, then the answer
        address = ctypes.addressof(buffer) if length else 0
        item = ctypes.create_string_buffer(struct.pack("<QiIQ", _I915_REGIONS, length, 0, address), 24)
        fcntl.ioctl(descriptor, _I915_QUERY, bytearray(struct.pack("<IIQ", 1, 0, ctypes.addressof(item))))
        length_or_error = struct.unpack_from("<i", item.raw, 8)[0]
        if length_or_error < 0:
            raise OSError(-length_or_error, os.strerror(-length_or_error))
        if not length:
            length = _check_length(length_or_error)
            buffer = ctypes.create_string_buffer(length)
    return buffer.raw


def _check_length(length: int) -> int:
    if not 0 < length <= _MOST:
        raise OSError(f"its answer would have {length} bytes")
    return length
