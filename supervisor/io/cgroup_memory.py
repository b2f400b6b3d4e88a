"""Memory limits of the control groups this process lives in, versions 1 and 2.

In a container /proc/meminfo speaks of the whole machine; the limit that kills us is the group's, or an ancestor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number just below 2**63


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One group, by its folder. Figures are bytes."""

    folder: Path
    version: int

    def limit(self) -> int | None:
        """Its own limit; None: none, or it can't be read."""
        text = _text(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

    def available(self) -> int | None:
        """What could still be taken: page cache counts as available, as in MemAvailable. None: no limit."""
        limit = self.limit()
        usage = _text(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or not usage.isdigit():
            return None
        prefix = "" if self.version == 2 else "total_"
        stat = dict(line.split() for line in _text(self.folder / "memory.stat").splitlines())
        cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
        return max(0, limit - int(usage) + cache)


def limited_groups(proc: Path = Path("/proc/self")) -> tuple[MemoryGroup, ...]:
    """The memory groups that limit this process: its own and its ancestors."""
    mounts = _mounts(_text(proc / "mountinfo"))
    groups: list[MemoryGroup] = []
    for line in _text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1
        if version in mounts and (version == 2 or "memory" in controllers.split(",")):
            mount, root = mounts[version]
            groups += [MemoryGroup(folder, version) for folder in _folders(mount, root, path)]
    return tuple(group for group in groups if group.limit() is not None)


def _folders(mount: Path, root: str, path: str) -> list[Path]:
    # In a container the mount may show only a part of the hierarchy, and `path` be outside of it or relative to it.
    inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else "/"
    folder = mount / inside.strip("/")
    return [place for place in (folder, *folder.parents) if place.is_relative_to(mount)]


def _mounts(mountinfo: str) -> dict[int, tuple[Path, str]]:
    mounts: dict[int, tuple[Path, str]] = {}
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, _, root, mount, *_ = fields.split()
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2":
            mounts[2] = (Path(mount), root)
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts[1] = (Path(mount), root)
    return mounts


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
