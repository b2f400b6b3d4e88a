"""GPUs by the kernel's DRM drivers: their free memory, and each process's use. No library is needed.

    /proc/PID/fdinfo/*    drm-pdev, drm-client-id, and sizes by region of each open device: drm-memory-vram (amdgpu),
                          drm-resident-vram0 (xe), drm-resident-local0 (i915); gtt and system are main memory

Several descriptors of a process, or of several, may be one client of the driver, which counts once. Descriptors of other
users' processes can't be read, so their use is unknown. If our own workers show none, a worker's use is the fall
of free memory while it loads.

An unreadable GPU keeps its last values, marked stale; a GPU without its folder is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from runtimes.device_kind import DeviceKind
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId
from supervisor.host.memory.free_delta import FreeDelta
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import (
    MIB,
    DeviceFound,
    DeviceInfo,
    HolderPids,
    Holders,
    Reading,
    WorkerKey,
    default_margin_mib,
    mib_up,
)
from supervisor.host.memory.unified import UnifiedMemory
from supervisor.host.process import procfs
from supervisor.host.process.procfs import ProcessTable

SYS: Final = Path("/sys")
PROC: Final = Path("/proc")

_UNITS: Final = {b"": 1, b"B": 1, b"KiB": 1024, b"MiB": MIB, b"GiB": 1024 * MIB}
_REGION: Final = re.compile(rb"drm-(memory|resident|total)-(?:(vram|local)|gtt|system)\d*")
_STATISTICS: Final = (b"memory", b"resident", b"total")
"""The figures that drivers show for each region, the best first; not every driver shows all."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Card:
    """How to read a GPU. `free_bytes`: the free bytes of its memory, given the bytes of our workers; raises OSError.

    `pool_mib`: the budget of a GPU that computes in main memory; then `free_bytes` is the driver's limit, or None.
    """

    folder: Path
    address: str  # on the PCI bus
    free_bytes: Callable[[int], int | None]
    pool_mib: int | None = None


@dataclass(slots=True)
class _Gpu:
    info: DeviceInfo
    card: Card
    pool: UnifiedMemory | None
    deltas: FreeDelta = field(default_factory=FreeDelta)
    last: DeviceSample | None = None
    used: dict[WorkerKey, int | None] = field(default_factory=dict)
    trouble: str | None = None


def sys_folder() -> Path:
    """`/sys`, or the folder in LLMUX_AMD_SYS, which tests set; the folder `dev` beside it stands for /dev."""
    return Path(os.environ.get("LLMUX_AMD_SYS", SYS))


class DrmReader:
    """A MemoryReader for some GPUs of a kind, each with its margin in MiB (None: the default)."""

    def __init__(
        self,
        kind: DeviceKind,
        gpus: Iterable[tuple[DeviceFound, int | None]],
        proc: Path,
        host: Callable[[], HostMemory],
    ) -> None:
        self._proc = proc
        self._gpus = tuple(_make_gpu(kind, found, margin_mib, host) for found, margin_mib in gpus)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(gpu.info for gpu in self._gpus)

    def read(self, holders: Holders) -> Reading:
        ids = {gpu.info.id for gpu in self._gpus}
        ours = {key: holder for key, holder in holders.items() if not ids.isdisjoint(holder.devices)}
        table = ProcessTable.scan() if ours else ProcessTable({})
        trees = {key: table.tree(holder.roots) for key, holder in ours.items()}
        taken = {key: self._taken_bytes(tree) for key, tree in trees.items()}
        workers: list[WorkerSample] = []
        for gpu in self._gpus:
            mine = {key: holder for key, holder in ours.items() if gpu.info.id in holder.devices}
            try:
                _read_gpu(gpu, mine, {key: trees[key] for key in mine}, {key: taken[key] for key in mine})
            except OSError as error:
                _mark_unreadable(gpu, error)
            workers += [WorkerSample(*key, gpu.info.id, gpu.used.get(key)) for key in mine]
        devices = tuple(gpu.last or DeviceSample(gpu.info.id, 0, stale=True) for gpu in self._gpus)
        return Reading(devices, tuple(workers), self._busy_shares())

    def _busy_shares(self) -> dict[DeviceId, float]:
        found = {}
        for gpu in self._gpus:
            with contextlib.suppress(OSError):  # not every GPU shows this
                found[gpu.info.id] = min(100, number(gpu.card.folder / "gpu_busy_percent")) / 100
        return found

    def _taken_bytes(self, tree: frozenset[int]) -> dict[str, tuple[int, int]]:
        """The bytes of the GPU's own memory and of main memory that these processes hold, by PCI address."""
        clients: dict[tuple[str, bytes], tuple[int, int]] = {}
        for pid in tree:
            for file in _list_files(self._proc / str(pid) / "fdinfo"):
                fields = dict(_parse_fields(procfs.read(str(file))))
                if b"drm-pdev" in fields:
                    address = fields[b"drm-pdev"].decode(errors="replace")
                    clients[address, fields.get(b"drm-client-id", str(file).encode())] = _client_bytes(fields)
        found: dict[str, tuple[int, int]] = {}
        for (address, _), (own, main) in clients.items():
            before = found.get(address, (0, 0))
            found[address] = before[0] + own, before[1] + main
        return found


def _read_gpu(
    gpu: _Gpu,
    mine: Mapping[WorkerKey, HolderPids],
    trees: Mapping[WorkerKey, frozenset[int]],
    taken: Mapping[WorkerKey, Mapping[str, tuple[int, int]]],
) -> None:
    address = gpu.card.address
    left = gpu.card.free_bytes(sum(found[address][0] for found in taken.values() if address in found))
    if gpu.pool is not None:
        left_mib = None if left is None else left // MIB
        on_gpu = {key: sum(found[address]) if address in found else None for key, found in taken.items()}
        gpu.last, gpu.used = gpu.pool.read(gpu.info.id, mine, trees, on_gpu, left_mib)
    else:
        free_mib = (left or 0) // MIB
        deltas = gpu.deltas.update(free_mib, {key: holder.loading for key, holder in mine.items()})
        gpu.used = {key: mib_up(found[address][0]) if address in found else deltas[key] for key, found in taken.items()}
        gpu.last = DeviceSample(gpu.info.id, free_mib)
    if gpu.trouble is not None:
        log.info("gpu.readable", device=gpu.info.id)
        gpu.trouble = None


def _mark_unreadable(gpu: _Gpu, error: OSError) -> None:
    reason = error.strerror or str(error)
    if gpu.trouble != reason:
        log.warning("gpu.unreadable", device=gpu.info.id, reason=reason)
    gpu.trouble = reason
    lost_reason = None if gpu.card.folder.is_dir() else "its folder in /sys is gone"
    gpu.last = DeviceSample(gpu.info.id, gpu.last.free_mib if gpu.last else 0, stale=True, lost=lost_reason)


def _make_gpu(kind: DeviceKind, found: DeviceFound, margin_mib: int | None, host: Callable[[], HostMemory]) -> _Gpu:
    assert isinstance(found.handle, Card)
    margin_mib = default_margin_mib(found.total_mib) if margin_mib is None else margin_mib
    device = DeviceId(kind.device_id(found.index))
    info = DeviceInfo(
        device, kind, found.name, found.total_mib, margin_mib, found.index, found.uuid or None, pci=found.pci
    )
    pool = None if found.handle.pool_mib is None else UnifiedMemory(host(), found.handle.pool_mib)
    return _Gpu(info, found.handle, pool)


def number(file: Path) -> int:
    """The number in a file of the kernel. Raises OSError if it holds none."""
    try:
        return int(file.read_text(encoding="ascii"))
    except ValueError as error:
        raise OSError(f"{file.name} holds no number") from error


def text(file: Path) -> str:
    """The text in a file of the kernel; empty if the file is missing."""
    return procfs.read(str(file)).decode(errors="replace").strip()


def closed(*files: Path) -> str | None:
    """The reason why workers can't compute: a device file that can't be opened; None: all of `files` can be opened."""
    for file in files:
        if not os.access(file, os.R_OK | os.W_OK):
            return f"can't be used: {file} {'may not be opened by this user' if file.exists() else 'is not there'}"
    return None


def _client_bytes(fields: Mapping[bytes, bytes]) -> tuple[int, int]:
    """The bytes that a client has of the GPU's own memory and of main memory, by the best statistic that its driver shows."""
    regions = [(match[1], bool(match[2]), name) for name in fields if (match := _REGION.fullmatch(name)) is not None]
    sizes = []
    for own in (True, False):
        by = {one for one, is_own, _ in regions if is_own == own}
        best = next((one for one in _STATISTICS if one in by), b"")
        sizes.append(sum(_parse_size(fields[name]) for one, is_own, name in regions if (one, is_own) == (best, own)))
    return sizes[0], sizes[1]


def _list_files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # the process has ended, or belongs to another user


def _parse_fields(content: bytes) -> Iterable[tuple[bytes, bytes]]:
    for line in content.splitlines():
        name, colon, value = line.partition(b":")
        if colon:
            yield name, value.strip()


def _parse_size(value: bytes) -> int:
    digits, _, unit = value.partition(b" ")
    return int(digits) * _UNITS.get(unit.strip(), 0) if digits.isdigit() else 0
