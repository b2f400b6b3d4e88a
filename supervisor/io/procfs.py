"""Process trees and what they take, read from /proc.

One scan of /proc serves every worker: it maps each process to its parent, and a worker's tree is everything below its
root (the shim, to which all of the worker's descendants are reparented). All of this blocks for milliseconds, so it is
called off the event loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OUR_OWN_TROUBLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Every process visible here: pid to parent's pid, at one moment."""

    parents: dict[int, int]

    @classmethod
    def scan(cls) -> ProcessTable:
        """Read /proc. Processes that end meanwhile are left out; raises OSError when /proc itself can't be listed."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208  # names are enough, and there are many
            if name.isdigit() and (stat := _read(f"/proc/{name}/stat")):
                # The second field is the program's name in parentheses and may hold anything, also parentheses.
                parents[int(name)] = int(stat[stat.rindex(b")") + 2 :].split(None, 2)[1])
        return cls(parents)

    def tree(self, roots: Iterable[int]) -> frozenset[int]:
        """The living processes among `roots` and all their descendants."""
        children: dict[int, list[int]] = {}
        for pid, parent in self.parents.items():
            children.setdefault(parent, []).append(pid)
        found: set[int] = set()
        pending = [pid for pid in roots if pid in self.parents]
        while pending:
            pid = pending.pop()
            if pid not in found:
                found.add(pid)
                pending.extend(children.get(pid, ()))
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of physical memory of one process or several.

    `total_bytes` is their share of it, `file_bytes` of which are mapped from files: pages are divided among their users
    (PSS). `largest_bytes` is all that the largest of them has resident, whoever else has the same pages (RSS).
    """

    total_bytes: int = 0
    file_bytes: int = 0
    largest_bytes: int = 0

    @property
    def alone_bytes(self) -> int:
        """What they would take without anybody who shares pages with them: this at least, exactly if it is one process."""
        return max(self.total_bytes, self.largest_bytes)

    def __add__(self, other: Resident) -> Resident:
        return Resident(
            self.total_bytes + other.total_bytes,
            self.file_bytes + other.file_bytes,
            max(self.largest_bytes, other.largest_bytes),
        )


def resident(pid: int) -> Resident:
    """What one process takes; its RSS for its share, where the kernel does not let us see that. Nothing if it is gone."""
    found = _resident(f"/proc/{pid}")
    if found.total_bytes:
        return found
    # A process whose first thread has ended shows no memory of its own while its other threads still hold all of it.
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  # names are enough
    except OSError:
        return Resident()
    others = (_resident(f"/proc/{pid}/task/{tid}") for tid in threads if int(tid) != pid)
    return next((other for other in others if other.total_bytes), Resident())


def _resident(folder: str) -> Resident:
    if rollup := _read(f"{folder}/smaps_rollup"):
        kib = _fields(rollup)
        if b"Pss_File" in kib:  # Linux 5.4
            return Resident(kib[b"Pss"] * 1024, kib[b"Pss_File"] * 1024, kib[b"Rss"] * 1024)
    # No permission: a process that forbids core dumps hides its maps even from its own user.
    if status := _read(f"{folder}/status"):
        kib = _fields(status)
        rss = kib.get(b"VmRSS", 0) * 1024
        return Resident(rss, kib.get(b"RssFile", 0) * 1024, rss)
    return Resident()


def resident_quickly(pid: int) -> Resident:
    """Its RSS from counters the kernel keeps, in constant time however large it is; shared memory counts as file pages."""
    statm = _read(f"/proc/{pid}/statm").split()
    if not statm:
        return Resident()
    rss = int(statm[1]) * _PAGE
    return Resident(rss, int(statm[2]) * _PAGE, rss)


def bytes_read(pid: int) -> int:
    """Bytes it has read so far, by calls or through mapped files; 0 where that can't be seen."""
    counters = _fields(_read(f"/proc/{pid}/io"))
    return counters.get(b"rchar", 0) + counters.get(b"read_bytes", 0)


def _fields(text: bytes) -> dict[bytes, int]:
    fields = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(b":")
        value = rest.split(None, 1)
        if colon and value and value[0].isdigit():
            fields[name] = int(value[0])
    return fields


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _OUR_OWN_TROUBLE:
            raise  # a process must not look gone because we ran out of descriptors
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""  # ended between open and read
    finally:
        os.close(fd)
