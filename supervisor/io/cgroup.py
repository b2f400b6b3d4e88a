"""A control group per worker, where the system lets us: killing a group can't be outrun by anything in it.

Only a cgroup v2 that was delegated to the daemon is used (systemd does it for user services): our own group, writable,
and not the root of the whole system. No controller is switched on, so the daemon may stay in the parent group. Where
there is no delegation nothing is lost but one belt: the shim contains the tree by itself.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

_PREFIX = "llmux-"


@cache
def delegated() -> Path | None:
    """The directory of the daemon's own group when it may make groups below it, else None. Read once."""
    try:
        ours = next(
            line[3:].lstrip("/")
            for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
            if line.startswith("0::")
        )
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    except (OSError, StopIteration):
        return None
    for fields in mounts:
        # ID parent device root mountpoint options [optional…] - type source options
        if fields[fields.index("-") + 1] == "cgroup2" and fields[3] == "/":
            own = Path(fields[4]) / ours
            # The system's root group has no cgroup.kill: a group that isn't the system's, but ours to divide, has one.
            if (own / "cgroup.kill").exists() and os.access(own, os.W_OK) and os.access(own / "cgroup.procs", os.W_OK):
                return own
    return None


def create(name: str, parent: Path | None = None) -> Path | None:
    """A new group below `parent` (default: the delegated one); None where that can't be done."""
    parent = parent or delegated()
    if parent is None:
        return None
    path = parent / (_PREFIX + "".join(c if c.isalnum() or c in "-_." else "_" for c in name))
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    return path


def kill(path: Path) -> None:
    """SIGKILL to all that is in the group, whatever forks meanwhile. Silent when it is gone."""
    with contextlib.suppress(OSError):
        (path / "cgroup.kill").write_text("1", encoding="utf-8")


def remove(path: Path) -> None:
    """Forget the group; it stays while a process is in it."""
    with contextlib.suppress(OSError):
        path.rmdir()


def left_behind(instance: str, parent: Path | None = None) -> list[Path]:
    """Groups that an earlier daemon of this instance made."""
    parent = parent or delegated()
    return sorted(parent.glob(f"{_PREFIX}{instance}-*")) if parent else []


def containment() -> str:
    """How the trees of workers are kept together here, for status pages."""
    return "subreaper shim + cgroup.kill" if delegated() else "subreaper shim"
