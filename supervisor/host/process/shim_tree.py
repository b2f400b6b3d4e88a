"""Signals to the whole tree below a shim: once to each of its processes, and to no others. Standard library only."""

# ruff: noqa: PTH123, PTH208
# pathlib would cost memory, too

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing's would cost a tenth of the shim's memory
if TYPE_CHECKING:
    from collections.abc import Callable


def processes() -> list[tuple[int, int, int, bytes]]:
    """(pid, parent, process group, start time) of every process; zombies too."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    fields = file.read(4096).rpartition(b")")[2].split()
            except OSError:
                continue
            found.append((int(name), int(fields[1]), int(fields[2]), fields[19]))
    return found


def signal_tree(signum: int) -> None:
    """Sends `signum` once to every descendant.

    Children (zombies too) are unreaped, so neither their pids nor their groups can have been reused, and no fork can outrun
    a signal to a group. Deeper descendants are held by a pidfd and recognised by their start time.
    """
    me, my_group = os.getpid(), os.getpgrp()
    table = processes()
    groups = {group for _, parent, group, _ in table if parent == me and group != my_group}
    for group in groups:
        send(os.killpg, group, signum)
    below = {me}
    grown = True
    while grown:
        more = {pid for pid, parent, _, _ in table if parent in below} - below
        below |= more
        grown = bool(more)
    for pid, parent, group, started in table:
        if pid == me or pid not in below or group in groups:
            continue
        if parent == me:
            send(os.kill, pid, signum)
        else:
            signal_same(pid, started, signum)


def send(how: Callable[[int, int], None], target: int, signum: int) -> None:
    try:  # noqa: SIM105  contextlib would cost memory, too
        how(target, signum)
    except OSError:
        pass  # dead, or it changed its user: the daemon reports that as unkillable


def signal_same(pid: int, started: bytes, signum: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            if file.read(4096).rpartition(b")")[2].split()[19] == started:
                signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        pass
    finally:
        os.close(pidfd)
