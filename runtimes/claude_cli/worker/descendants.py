"""Kills processes that a program leaves running in sessions of their own. The worker inherits them as their subreaper.

An inherited process no longer shows which program started it. So the worker kills it once every program has ended that
was running when the process started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36
KILL_WAIT_S: Final = 5.0
POLL_S: Final = 0.005
TICKS: Final = os.sysconf("SC_CLK_TCK")


class Descendants:
    """The descendants of this process. Create it before the first of them starts."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._lock = threading.Lock()
        self._start_times: list[
            int
        ] = []  # when each program that runs was started at the earliest, in ticks since the boot

    @contextlib.contextmanager
    def killing_leftovers(self) -> Iterator[None]:
        """The context in which a program starts, runs and ends. On exit, kills the processes that the program left behind."""
        with self._lock:
            began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)
            self._start_times.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._start_times.remove(began)
                self._kill_children(min(self._start_times, default=sys.maxsize))

    def _kill_children(self, oldest: int) -> None:
        """Kill the children that started before `oldest`. Their own children then become ours, and are killed as well."""
        until = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < until and (left := [pid for pid, started in _children() if started < oldest]):
            for pid in left:
                with contextlib.suppress(OSError):  # it has changed its user
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(POLL_S)  # in the thread of one request


def _children() -> Iterator[tuple[int, int]]:
    """The pid and start time (in ticks since boot) of each child, zombies included."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(
            os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT
        )  # looks whether there are any: usually there are none
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == os.getpid():
                    yield int(stat.parent.name), int(fields[19])
