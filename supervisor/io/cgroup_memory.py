"""Memory limits of the control groups this process lives in, versions 1 and 2.

In a container /proc/meminfo describes the whole machine; the limit that kills us is that of our group or an ancestor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from supervisor.io import procfs

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number just below 2**63


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One group, by its folder. Figures are bytes."""

    folder: Path
    version: int

    def limit(self) -> int | None:
        """Its own limit; None: no limit, or unreadable."""
        text = _text(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

    def available(self) -> int | None:
        """What can still be taken; page cache counts, as in MemAvailable. None: no limit."""
        limit = self.limit()
        usage = _text(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or not usage.isdigit():
            return None
        prefix = "" if self.version == 2 else "total_"
        stat = procfs.numbers(procfs.read(f"{self.folder}/memory.stat"))
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
            groups += [MemoryGroup(folder, version) for folder in _folders(mounts[version], path)]
    return tuple(group for group in groups if group.limit() is not None)


def _folders(mount: procfs.Mount, path: str) -> list[Path]:
    # In a container the mount may show only a part of the hierarchy, and `path` be outside of it or relative to it.
    inside = path.removeprefix(mount.root.rstrip("/")) if path.startswith(mount.root) else "/"
    folder = mount.point / inside.strip("/")
    return [place for place in (folder, *folder.parents) if place.is_relative_to(mount.point)]


def _text(path: Path) -> str:
    return os.fsdecode(procfs.read(str(path)).strip())
