"""AMD's GPUs that ROCm can use, read from the kernel's files.

    /sys/class/kfd/kfd/topology/nodes/N/    the GPUs, in ROCm's order, which ROCR_VISIBLE_DEVICES counts by
    /sys/class/drm/renderDM/device/         mem_info_vram_*, mem_info_gtt_*, gpu_busy_percent, gpu_metrics

An APU computes in main memory: its GTT is a window into main memory, and its VRAM a part that the firmware has reserved, which
the kernel doesn't count as memory any more. ROCm takes its memory from the larger of the two. If that is GTT, the APU is one
device with one budget; see `unified`. Most desktop processors have a small APU that isn't meant for models, so an APU is used
only where the configuration lists it. An APU is recognised by its `gpu_metrics`: the format's version is 1 for cards, 2 or
more for APUs.

Reading needs no permission, but workers open /dev/kfd and /dev/dri/renderDM to compute. Without permission for these files, or
without them in a container, a GPU can't be used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from runtimes.device_kind import ROCM
from supervisor.host.memory.drm import PROC, Card, DrmReader, closed, number, sys_folder, text
from supervisor.host.memory.host_memory import BUDGET_SHARE, HostMemory
from supervisor.host.memory.memory import MIB, DeviceFound, DriverUnavailableError
from supervisor.host.process import procfs
from supervisor.host.process.procfs import numbers

LISTED: Final = "computes in main memory; list it under devices to use it"
_NODES: Final = "class/kfd/kfd/topology/nodes"


class AmdDriver:
    """The kernel's driver. Raises DriverUnavailableError if it isn't loaded."""

    def __init__(self, sys: Path | None = None, proc: Path = PROC, host: Callable[[], HostMemory] = HostMemory) -> None:
        self._sys, self._proc, self._host = sys or sys_folder(), proc, host
        self._dev = self._sys.with_name("dev")
        if not os.path.isdir(self._sys / _NODES):  # noqa: PTH112  # any failure to read it counts as no driver
            raise DriverUnavailableError("the kernel's driver shows none (/sys/class/kfd)")

    def find(self) -> tuple[DeviceFound, ...]:
        """See `Driver`."""
        try:
            nodes = sorted((self._sys / _NODES).iterdir(), key=lambda node: (len(node.name), node.name))
        except OSError as error:
            raise DriverUnavailableError(f"/sys/class/kfd can't be read: {error.strerror}") from error
        gpus = [node for node in nodes if text(node / "gpu_id") not in ("", "0")]
        return tuple(self._inspect(index, node) for index, node in enumerate(gpus))

    def reader(self, devices: Sequence[tuple[DeviceFound, int | None]]) -> DrmReader:
        return DrmReader(ROCM, devices, self._proc, self._host)

    def _inspect(self, index: int, node: Path) -> DeviceFound:
        properties = numbers(procfs.read(str(node / "properties")))
        render = f"renderD{properties.get(b'drm_render_minor', 0)}"
        folder = self._sys / "class/drm" / render / "device"
        name = text(folder / "product_name") or f"AMD {text(node / 'name') or 'GPU'}"
        unique = properties.get(b"unique_id", 0)
        uuid = f"GPU-{unique:016x}" if unique else ""
        return found_at(folder, index, uuid, name, closed(self._dev / "kfd", self._dev / "dri" / render), self._host)


def found_at(
    folder: Path, index: int, uuid: str, name: str, unusable: str | None, host: Callable[[], HostMemory]
) -> DeviceFound:
    """The GPU with this folder of amdgpu's figures."""
    try:
        vram, gtt = number(folder / "mem_info_vram_total"), number(folder / "mem_info_gtt_total")
    except OSError as error:
        return DeviceFound(index, uuid, name, unusable=f"can't be read: {error.strerror or error}")
    address = folder.resolve().name
    is_apu = procfs.read(str(folder / "gpu_metrics"))[2:3] >= b"\2"
    only_listed = LISTED if is_apu else None
    unified = is_apu and vram < gtt
    pool_mib = min(gtt // MIB, int(host().physical_mib * BUDGET_SHARE)) if unified else None
    region = "gtt" if unified else "vram"
    card = Card(folder, address, lambda _ours: _free_bytes(folder, region), pool_mib)
    total_mib = vram // MIB if pool_mib is None else pool_mib
    return DeviceFound(
        index, uuid, name, total_mib, card, unusable=unusable, only_listed=only_listed, unified=unified, pci=address
    )


def _free_bytes(folder: Path, region: str) -> int:
    """The free bytes of a region. Raises OSError for impossible figures."""
    total, used = (number(folder / f"mem_info_{region}_{what}") for what in ("total", "used"))
    if not 0 <= used <= total:
        raise OSError(f"{used} of {total} bytes of {region} are taken")
    return total - used
