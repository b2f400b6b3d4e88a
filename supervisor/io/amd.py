"""AMD's GPUs, read from the kernel's files: memory, what each process takes, how busy they are. No library is needed.

    /sys/class/kfd/kfd/topology/nodes/N/    the GPUs that ROCm can use, in ROCm's order, which ROCR_VISIBLE_DEVICES counts by
    /sys/class/drm/renderDM/device/         mem_info_vram_*, mem_info_gtt_*, gpu_busy_percent, gpu_metrics
    /proc/PID/fdinfo/*                      drm-pdev, drm-client-id, drm-memory-vram, drm-memory-gtt of each open device

Several descriptors of a process, or of several, may be one client of the driver, which counts once. Descriptors of other
users' processes can't be read, so what others take is not told. Where our own workers show none, a worker's use is the fall
of free memory while it loads.

An APU computes in main memory: its GTT is a window into it, and its VRAM what the firmware has put aside, which the kernel
doesn't count as memory any more. ROCm takes its memory from the larger of the two. Where that is GTT, it is one device with
one budget; see `unified`. Most desktop processors have a small APU that nobody wants models on, so one is used only where the
configuration lists it. An APU is told by its `gpu_metrics`: the format's version is 1 for cards, 2 or more for APUs.

Reading needs no permission, computing does: workers open /dev/kfd and /dev/dri/renderDM. A GPU whose files this user can't
open, or that a container wasn't given, can't be used.

A GPU that can't be read keeps its last values, marked stale; one whose folder is gone is lost.

Tests set LLMUX_AMD_SYS to a folder that is read in place of /sys; the one beside it stands for /dev.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from runtimes.device_kind import ROCM
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId
from supervisor.io import procfs
from supervisor.io.free_delta import FreeDelta
from supervisor.io.host_memory import BUDGET_SHARE, HostMemory
from supervisor.io.memory import (
    MIB,
    DeviceFound,
    DeviceInfo,
    DriverUnavailableError,
    HolderPids,
    Holders,
    Reading,
    WorkerKey,
    default_margin_mib,
    mib_up,
)
from supervisor.io.procfs import ProcessTable, numbers
from supervisor.io.unified import UnifiedMemory

SYS: Final = Path("/sys")
PROC: Final = Path("/proc")
_NODES: Final = "class/kfd/kfd/topology/nodes"

_UNITS: Final = {b"": 1, b"B": 1, b"KiB": 1024, b"MiB": MIB, b"GiB": 1024 * MIB}
_LISTED: Final = "computes in main memory; list it under devices to use it"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Card:
    """Where a GPU is read. `pool_mib`: its budget, where that is main memory."""

    folder: Path
    address: str  # on the PCI bus
    pool_mib: int | None = None


@dataclass(slots=True)
class _Gpu:
    info: DeviceInfo
    card: _Card
    pool: UnifiedMemory | None
    deltas: FreeDelta = field(default_factory=FreeDelta)
    last: DeviceSample | None = None
    used: dict[WorkerKey, int | None] = field(default_factory=dict)
    trouble: str | None = None


def sys_folder() -> Path:
    """`/sys`, or what tests set LLMUX_AMD_SYS to."""
    return Path(os.environ.get("LLMUX_AMD_SYS", SYS))


class AmdDriver:
    """The kernel's driver. Raises DriverUnavailableError where it isn't loaded."""

    def __init__(self, sys: Path | None = None, proc: Path = PROC, host: Callable[[], HostMemory] = HostMemory) -> None:
        self._sys, self._proc, self._host = sys or sys_folder(), proc, host
        self._dev = self._sys.with_name("dev")
        if not os.path.isdir(self._sys / _NODES):  # noqa: PTH112  # whatever keeps it from being read
            raise DriverUnavailableError("the kernel's driver shows none (/sys/class/kfd)")

    def find(self) -> tuple[DeviceFound, ...]:
        """See `Driver`."""
        try:
            nodes = sorted((self._sys / _NODES).iterdir(), key=lambda node: (len(node.name), node.name))
        except OSError as error:
            raise DriverUnavailableError(f"/sys/class/kfd can't be read: {error.strerror}") from error
        gpus = [node for node in nodes if _text(node / "gpu_id") not in ("", "0")]
        return tuple(self._look(index, node) for index, node in enumerate(gpus))

    def reader(self, devices: Sequence[tuple[DeviceFound, int | None]]) -> AmdReader:
        return AmdReader(devices, self._proc, self._host)

    def _look(self, index: int, node: Path) -> DeviceFound:
        told = numbers(procfs.read(str(node / "properties")))
        render = f"renderD{told.get(b'drm_render_minor', 0)}"
        folder = self._sys / "class/drm" / render / "device"
        name = _text(folder / "product_name") or f"AMD {_text(node / 'name') or 'GPU'}"
        unique = told.get(b"unique_id", 0)
        uuid = f"GPU-{unique:016x}" if unique else ""
        try:
            vram, gtt = _number(folder / "mem_info_vram_total"), _number(folder / "mem_info_gtt_total")
        except OSError as error:
            return DeviceFound(index, uuid, name, unusable=f"can't be read: {error.strerror or error}")
        address = folder.resolve().name
        card, listed = _Card(folder, address), _LISTED if _is_apu(folder) else None
        unusable = self._closed(render)
        if listed is None or vram >= gtt:
            return DeviceFound(index, uuid, name, vram // MIB, card, unusable=unusable, only_listed=listed, pci=address)
        pool_mib = min(gtt // MIB, int(self._host().physical_mib * BUDGET_SHARE))
        card = replace(card, pool_mib=pool_mib)
        return DeviceFound(
            index, uuid, name, pool_mib, card, unusable=unusable, only_listed=listed, unified=True, pci=address
        )

    def _closed(self, render: str) -> str | None:
        """Which file keeps workers from computing on it."""
        for file in (self._dev / "kfd", self._dev / "dri" / render):
            if not os.access(file, os.R_OK | os.W_OK):
                return f"can't be used: {file} {'may not be opened by this user' if file.exists() else 'is not there'}"
        return None


class AmdReader:
    """A MemoryReader for some GPUs, each with its margin in MiB (None: the default)."""

    def __init__(
        self, gpus: Iterable[tuple[DeviceFound, int | None]], proc: Path, host: Callable[[], HostMemory]
    ) -> None:
        self._proc = proc
        self._gpus = tuple(_gpu(found, margin_mib, host) for found, margin_mib in gpus)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(gpu.info for gpu in self._gpus)

    def read(self, holders: Holders) -> Reading:
        ids = {gpu.info.id for gpu in self._gpus}
        ours = {key: holder for key, holder in holders.items() if not ids.isdisjoint(holder.devices)}
        table = ProcessTable.scan() if ours else ProcessTable({})
        trees = {key: table.tree(holder.roots) for key, holder in ours.items()}
        taken = {key: self._taken(tree) for key, tree in trees.items()}
        workers: list[WorkerSample] = []
        for gpu in self._gpus:
            mine = {key: holder for key, holder in ours.items() if gpu.info.id in holder.devices}
            try:
                _read(gpu, mine, {key: trees[key] for key in mine}, {key: taken[key] for key in mine})
            except OSError as error:
                _lost(gpu, error)
            workers += [WorkerSample(*key, gpu.info.id, gpu.used.get(key)) for key in mine]
        devices = tuple(gpu.last or DeviceSample(gpu.info.id, 0, stale=True) for gpu in self._gpus)
        return Reading(devices, tuple(workers), self._busy())

    def _busy(self) -> dict[DeviceId, float]:
        found = {}
        for gpu in self._gpus:
            with contextlib.suppress(OSError):  # not every GPU tells
                found[gpu.info.id] = min(100, _number(gpu.card.folder / "gpu_busy_percent")) / 100
        return found

    def _taken(self, tree: frozenset[int]) -> dict[str, tuple[int, int]]:
        """By PCI address: bytes of VRAM and of GTT that these processes hold."""
        clients: dict[tuple[str, bytes], tuple[int, int]] = {}
        for pid in tree:
            for file in _files(self._proc / str(pid) / "fdinfo"):
                told = dict(_fields(procfs.read(str(file))))
                if told.get(b"drm-driver") == b"amdgpu" and b"drm-pdev" in told:
                    client = (
                        told[b"drm-pdev"].decode(errors="replace"),
                        told.get(b"drm-client-id", str(file).encode()),
                    )
                    clients[client] = (_size(told, b"drm-memory-vram"), _size(told, b"drm-memory-gtt"))
        found: dict[str, tuple[int, int]] = {}
        for (address, _), (vram, gtt) in clients.items():
            before = found.get(address, (0, 0))
            found[address] = before[0] + vram, before[1] + gtt
        return found


def _read(
    gpu: _Gpu,
    mine: Mapping[WorkerKey, HolderPids],
    trees: Mapping[WorkerKey, frozenset[int]],
    taken: Mapping[WorkerKey, Mapping[str, tuple[int, int]]],
) -> None:
    folder, address = gpu.card.folder, gpu.card.address
    if gpu.pool is not None:
        left_mib = _left(folder, "gtt") // MIB
        on_gpu = {key: sum(found[address]) if address in found else None for key, found in taken.items()}
        gpu.last, gpu.used = gpu.pool.read(gpu.info.id, mine, trees, on_gpu, left_mib)
    else:
        free_mib = _left(folder, "vram") // MIB
        deltas = gpu.deltas.update(free_mib, {key: holder.loading for key, holder in mine.items()})
        gpu.used = {key: mib_up(found[address][0]) if address in found else deltas[key] for key, found in taken.items()}
        gpu.last = DeviceSample(gpu.info.id, free_mib)
    if gpu.trouble is not None:
        log.info("gpu.readable", device=gpu.info.id)
        gpu.trouble = None


def _lost(gpu: _Gpu, error: OSError) -> None:
    reason = error.strerror or str(error)
    if gpu.trouble != reason:
        log.warning("gpu.unreadable", device=gpu.info.id, reason=reason)
    gpu.trouble = reason
    gone = None if gpu.card.folder.is_dir() else "its folder in /sys is gone"
    gpu.last = DeviceSample(gpu.info.id, gpu.last.free_mib if gpu.last else 0, stale=True, lost=gone)


def _gpu(found: DeviceFound, margin_mib: int | None, host: Callable[[], HostMemory]) -> _Gpu:
    assert isinstance(found.handle, _Card)
    margin_mib = default_margin_mib(found.total_mib) if margin_mib is None else margin_mib
    device = DeviceId(ROCM.device_id(found.index))
    info = DeviceInfo(
        device, ROCM, found.name, found.total_mib, margin_mib, found.index, found.uuid or None, pci=found.pci
    )
    pool = None if found.handle.pool_mib is None else UnifiedMemory(host(), found.handle.pool_mib)
    return _Gpu(info, found.handle, pool)


def _is_apu(folder: Path) -> bool:
    return procfs.read(str(folder / "gpu_metrics"))[2:3] >= b"\2"


def _left(folder: Path, kind: str) -> int:
    """Bytes that aren't taken. Raises OSError for figures that can't be."""
    total, used = (_number(folder / f"mem_info_{kind}_{what}") for what in ("total", "used"))
    if not 0 <= used <= total:
        raise OSError(f"{used} of {total} bytes of {kind} are taken")
    return total - used


def _number(file: Path) -> int:
    """Raises OSError where there is none."""
    try:
        return int(file.read_text(encoding="ascii"))
    except ValueError as error:
        raise OSError(f"{file.name} holds no number") from error


def _text(file: Path) -> str:
    return procfs.read(str(file)).decode(errors="replace").strip()


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # it has ended, or is another user's


def _fields(text: bytes) -> Iterable[tuple[bytes, bytes]]:
    for line in text.splitlines():
        name, colon, value = line.partition(b":")
        if colon:
            yield name, value.strip()


def _size(told: Mapping[bytes, bytes], name: bytes) -> int:
    number, _, unit = told.get(name, b"0").partition(b" ")
    return int(number) * _UNITS.get(unit.strip(), 0) if number.isdigit() else 0
