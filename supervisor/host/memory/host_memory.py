"""Host memory as a device: a budget that models share, measured.

Use is the physical memory of whole process trees, with shared pages divided among their users (PSS). It includes mapped
pages of model files: the kernel could drop them and read them again, but a model with its weights on disk is not loaded.
The kernel still calls these pages available, so they are subtracted there. Swapped-out pages don't count.

    free    = min(available - mapped file pages of our workers, budget - use of our workers), within 0 .. budget
    outside = budget - use of our workers - free: memory that others have taken out of the budget

so budget = use + free + outside. Other programs may fill the rest of the machine, which these figures don't show. `available`
is the kernel's MemAvailable, or less where a control group (version 1 or 2) limits us: in a container /proc/meminfo describes
the whole machine, but the kernel kills us at the limit of our group or an ancestor.

A single worker's figure is its memory if it ran alone (`Resident.alone_bytes`): shared pages, such as a runtime's libraries,
stay when another worker ends, and a share of these pages would be too little for the next start. So the sum of the workers'
figures may exceed their use.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtimes.device_kind import HOST
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId
from supervisor.host.memory.memory import MIB, DeviceInfo, Holders, Reading, WorkerKey, default_margin_mib, mib_up
from supervisor.host.process import procfs
from supervisor.host.process.procfs import ProcessTable, Resident, numbers, read, resident, resident_quickly

DEVICE = DeviceId(HOST.device_id())
BUDGET_SHARE = 0.8
"""The default budget, of the machine's (or the control group's) memory."""

MEASURING_SHARE = 0.05
"""The share of one core for measuring one process, at most: a full measurement takes about 10 ms per GiB."""

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number just below 2**63


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group, by its folder. Figures are bytes."""

    folder: Path
    version: int

    def limit(self) -> int | None:
        """The group's own limit in bytes; None: no limit, or unreadable."""
        text = _read_text(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

    def available(self) -> int | None:
        """The available bytes, with page cache, as in MemAvailable. None: no limit."""
        limit = self.limit()
        usage = _read_text(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or not usage.isdigit():
            return None
        prefix = "" if self.version == 2 else "total_"
        stat = numbers(read(f"{self.folder}/memory.stat"))
        cache = sum(stat.get(f"{prefix}{name}".encode(), 0) for name in ("active_file", "inactive_file"))
        return max(0, limit - int(usage) + cache)


def limited_groups(proc: Path = procfs.SELF) -> tuple[MemoryGroup, ...]:
    """The memory groups that limit this process: its own and its ancestors."""
    mounts = {
        2 if mount.kind == "cgroup2" else 1: mount
        for mount in procfs.mounts(proc)
        if mount.kind == "cgroup2" or (mount.kind == "cgroup" and "memory" in mount.options)
    }
    groups: list[MemoryGroup] = []
    for controllers, path in procfs.groups(proc):
        version = 2 if not controllers else 1
        if version in mounts and (version == 2 or "memory" in controllers.split(",")):
            groups += [MemoryGroup(folder, version) for folder in _group_folders(mounts[version], path)]
    return tuple(group for group in groups if group.limit() is not None)


def _group_folders(mount: procfs.Mount, path: str) -> list[Path]:
    # In a container the mount may show only a part of the hierarchy, and `path` may be outside of this part or relative to it.
    inside = path.removeprefix(mount.root.rstrip("/")) if path.startswith(mount.root) else "/"
    folder = mount.point / inside.strip("/")
    return [place for place in (folder, *folder.parents) if place.is_relative_to(mount.point)]


def _read_text(path: Path) -> str:
    return os.fsdecode(read(str(path)).strip())


@dataclass(slots=True)
class _Measured:
    """The last full measurement of a process, and the quick figure of the same moment."""

    found: Resident
    quick: Resident
    again_at: float


class HostMemory:
    """A MemoryReader for host memory. `budget_mib` is at most the machine's memory; a smaller one has no margin by default."""

    def __init__(
        self,
        *,
        budget_mib: int | None = None,
        margin_mib: int | None = None,
        meminfo: Path = Path("/proc/meminfo"),
        groups: tuple[MemoryGroup, ...] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meminfo = meminfo
        self._groups = limited_groups() if groups is None else groups
        self._clock = clock
        self._measured: dict[int, _Measured] = {}
        limits = [limit for group in self._groups if (limit := group.limit()) is not None]
        self.physical_mib = min([self._meminfo_bytes("MemTotal"), *limits]) // MIB
        total_mib = min(budget_mib or int(self.physical_mib * BUDGET_SHARE), self.physical_mib)
        if margin_mib is None:  # a configured budget is leased without a margin
            margin_mib = 0 if budget_mib == total_mib else default_margin_mib(total_mib)
        self._device = DeviceInfo(DEVICE, HOST, "processor and RAM", total_mib, margin_mib)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (self._device,)

    def read(self, holders: Holders) -> Reading:
        mine = {key: holder for key, holder in holders.items() if DEVICE in holder.devices}
        table = ProcessTable.scan() if mine else ProcessTable({})
        uses = self.uses({key: table.tree(holder.roots) for key, holder in mine.items()})
        taken = sum(uses.values(), Resident())
        budget = self._device.total_mib
        left = budget - mib_up(taken.total_bytes)
        free = max(0, min((self.available_bytes() - taken.file_bytes) // MIB, left))
        outside = max(0, left) - free
        return Reading(
            (DeviceSample(DEVICE, free, outside_mib=outside),),
            tuple(WorkerSample(*key, DEVICE, mib_up(use.alone_bytes)) for key, use in uses.items()),
        )

    def uses(self, trees: Mapping[WorkerKey, frozenset[int]]) -> dict[WorkerKey, Resident]:
        """The memory of each worker's processes."""
        found = {key: sum(map(self._measure, tree), Resident()) for key, tree in trees.items()}
        self._measured = {pid: self._measured[pid] for tree in trees.values() for pid in tree if pid in self._measured}
        return found

    def _measure(self, pid: int) -> Resident:
        """A process's use: measured in full if that isn't too expensive now, else estimated by the growth of its RSS since then."""
        now = self._clock()
        quick = resident_quickly(pid)
        last = self._measured.get(pid)
        if last is not None and now < last.again_at:
            return Resident(
                max(0, last.found.total_bytes + quick.total_bytes - last.quick.total_bytes),
                max(0, last.found.file_bytes + quick.file_bytes - last.quick.file_bytes),
                quick.largest_bytes,
            )
        began = time.perf_counter()
        found = resident(pid)
        cost = time.perf_counter() - began
        self._measured[pid] = _Measured(found, quick, now + cost / MEASURING_SHARE)
        return found

    def available_bytes(self) -> int:
        """The available bytes. Raises OSError if the kernel doesn't show the figure."""
        limits = [left for group in self._groups if (left := group.available()) is not None]
        return min([self._meminfo_bytes("MemAvailable"), *limits])

    def _meminfo_bytes(self, field: str) -> int:
        kib = numbers(read(str(self._meminfo)))
        if field.encode() not in kib:
            raise OSError(errno.ENODATA, f"no {field}", str(self._meminfo))
        return kib[field.encode()] * 1024
