"""A worker's log, which its shim creates and bounds. Standard library only.

Workers write directly to the file: a pipe could block them, or be held open by a grandchild. A log over its limit is
shortened: the last half is copied to `LOG.1`, and the file truncated.
"""

# ruff: noqa: PTH103, PTH105, PTH110, PTH112, PTH120
# pathlib would cost memory, too

from __future__ import annotations

import ctypes
import fcntl
import os

IN_MODIFY = 0x2
IN_NONBLOCK_CLOEXEC = 0o2004000
LOOK_MIN_MS = 1  # pauses between two looks at a growing log: short while it grows fast
LOOK_MAX_MS = 50

libc = ctypes.CDLL(None, use_errno=True)


class Log:
    """The worker's bounded log file. Woken by inotify, so that a quiet worker costs nothing."""

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.trouble = ""  # the reason why nothing is logged
        try:
            self.fd = begin_log(path)
        except OSError as error:
            self.trouble = str(error)
            self.fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.size = 0
        self.pause_ms = LOOK_MIN_MS
        self.inotify = libc.inotify_init1(IN_NONBLOCK_CLOEXEC)
        if self.inotify >= 0:
            libc.inotify_add_watch(self.inotify, os.fsencode(path), IN_MODIFY)

    def look(self) -> None:
        """Shorten a log over its limit, and set `pause_ms` by its growth."""
        size = os.fstat(self.fd).st_size
        fast = size - self.size > self.limit // 16
        self.pause_ms = LOOK_MIN_MS if fast else min(self.pause_ms * 2, LOOK_MAX_MS)
        if size > self.limit:
            self.keep_last_half(size)
            size = 0
        self.size = size

    def keep_last_half(self, size: int) -> None:
        try:
            kept = os.open(self.path + ".1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                start = size - self.limit // 2
                while sent := os.sendfile(kept, self.fd, start, size - start):  # a signal cuts it short
                    start += sent
            finally:
                os.close(kept)
        except OSError:
            pass  # on a full disk truncating is even more urgent
        os.ftruncate(self.fd, 0)


def begin_log(path: str) -> int:
    """A descriptor of a new log; the last one stays readable as `LOG.1`. Raises OSError where nothing can be written."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):  # somebody removed it
        before = os.umask(0o077)
        os.makedirs(folder, exist_ok=True)
        os.umask(before)
    if os.path.exists(path):
        os.replace(path, path + ".1")
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"\n")  # a full disk often accepts a new file, but no content
        os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    try:  # noqa: SIM105  contextlib would cost memory, too
        fcntl.flock(fd, fcntl.LOCK_SH)  # marks processes that inherit it as the worker's: see reap.py
    except OSError:
        pass  # a file system without locks
    return fd
