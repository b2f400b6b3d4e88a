"""A control group per worker, where the system allows it: no fork can outrun the killing of a group.

Only a cgroup v2 that was delegated to the daemon is used (systemd does that for user services). It has no controllers, so
the daemon may stay in the parent group. Where nothing is delegated, the shim alone contains the tree.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

from supervisor.host.process import procfs

_PREFIX = "llmux-"


@cache
def delegated() -> Path | None:
    """The directory of the daemon's own group when it may make groups below it, else None. Read once."""
    ours = next((path for controllers, path in procfs.groups() if not controllers), None)
    if ours is None:
        return None
    for mount in procfs.mounts():
        if mount.kind == "cgroup2" and mount.root == "/":
            own = mount.point / ours.lstrip("/")
            # The root group of the system has no cgroup.kill.
            if (own / "cgroup.kill").exists() and os.access(own, os.W_OK) and os.access(own / "cgroup.procs", os.W_OK):
                return own
    return None


def create(name: str) -> Path | None:
    """Make a new group below the delegated one; None: that isn't possible."""
    if (parent := delegated()) is None:
        return None
    path = parent / (_PREFIX + "".join(c if c.isalnum() or c in "-_." else "_" for c in name))
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    return path


def kill(path: Path) -> None:
    """SIGKILL all processes of the group, including new forks. Does nothing if the group is gone."""
    with contextlib.suppress(OSError):
        (path / "cgroup.kill").write_text("1", encoding="utf-8")


def remove(path: Path) -> None:
    """Remove the group; it stays while a process is in it."""
    with contextlib.suppress(OSError):
        path.rmdir()


def leftover_groups(instance: str) -> list[Path]:
    """Groups that an earlier daemon of this instance made."""
    parent = delegated()
    return sorted(parent.glob(f"{_PREFIX}{instance}-*")) if parent else []
