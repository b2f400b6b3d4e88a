"""The only reader of /proc: processes, their trees and memory, and facts about the machine.

Reading a process that has ended, or that we may not read, gives nothing. If this process is out of descriptors or memory,
reading raises OSError, so that no process seems to have ended. Reads block for milliseconds: call them off the event loop.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

SELF: Final = Path("/proc/self")

_PAGE = os.sysconf("SC_PAGE_SIZE")
OUR_OWN_TROUBLE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_PF_EXITING = 0x4  # of the kernel's task flags


def read(path: str) -> bytes:
    """The whole file; empty if it can't be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in OUR_OWN_TROUBLE:
            raise
        return b""
    try:
        text = os.read(fd, 65536)
        while more := text and os.read(fd, 65536):  # long files come a page at a time
            text += more
    except OSError:
        return b""  # the process ended between open and read
    else:
        return text
    finally:
        os.close(fd)


def numbers(text: bytes) -> dict[bytes, int]:
    """The counters of a file with a name and a number on each line, with or without a colon between them."""
    found = {}
    for line in text.splitlines():
        name, *value = line.split(None, 2)[:2] or (b"",)
        if value and value[0].isdigit():
            found[name.rstrip(b":")] = int(value[0])
    return found


def _list_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  # names are enough, and there are many
    except OSError as error:
        if error.errno in OUR_OWN_TROUBLE:
            raise
        return []


# ------------------------------------------------------------------------------------------------------------ processes


@dataclass(frozen=True, slots=True)
class Proc:
    """One process at one moment. `started` (clock ticks since boot) distinguishes it from others that had its pid."""

    pid: int
    parent: int
    session: int
    state: str
    threads: int
    started: int
    flags: int

    @property
    def alive(self) -> bool:
        """False for a zombie; true while any thread runs, even when the first one has ended (state Z)."""
        return self.state not in "ZX" or self.threads > 1

    @property
    def dying(self) -> bool:
        """Is its first thread ending, or has it ended? The process may lose its marks before its memory is freed."""
        return bool(self.flags & _PF_EXITING)

    @classmethod
    def read(cls, pid: int) -> Proc | None:
        """The process with this pid; None when there is none."""
        # The second field is the program's name in parentheses, which may contain any character.
        fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if not fields:
            return None
        return cls(
            pid, int(fields[1]), int(fields[3]), chr(fields[0][0]), int(fields[17]), int(fields[19]), int(fields[6])
        )


def processes() -> list[Proc]:
    """Every process visible here, zombies too. A few milliseconds for a few hundred."""
    names = os.listdir("/proc")  # noqa: PTH208  # names are enough, and there are many; raises, else all would seem to have ended
    return [proc for name in names if name.isdigit() and (proc := Proc.read(int(name)))]


def environment(pid: int) -> frozenset[bytes]:
    """The process's environment variables, as `NAME=value`."""
    if text := read(f"/proc/{pid}/environ"):
        return frozenset(text.split(b"\0"))
    # After the end of its first thread, a process shows its environment only under its other threads.
    proc = Proc.read(pid)
    if proc and proc.state == "Z" and proc.threads > 1:
        texts = (read(f"/proc/{pid}/task/{tid}/environ") for tid in _list_names(f"/proc/{pid}/task"))
        return frozenset(next(filter(None, texts), b"").split(b"\0"))
    return frozenset()


def command(pid: int) -> str:
    """The process's command line, for people."""
    words = read(f"/proc/{pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ")
    return os.fsdecode(words or read(f"/proc/{pid}/comm").rstrip() or b"?")


def open_files(pid: int, *fds: int) -> Iterator[str]:
    """The targets of these of its descriptors, or of all: a path, or `socket:[INODE]`."""
    for fd in fds or _list_names(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115  # a hot path
        except OSError:
            continue


def holds_lock(pid: int, wanted: Callable[[str], bool], *fds: int) -> bool:
    """Is one of these descriptors, or of all, an open file that matches `wanted` and has a lock (flock)?

    A process shows the locks of open files that it opened or inherited. Opening the same path again gives another open file.
    """
    for fd in fds or map(int, _list_names(f"/proc/{pid}/fd")):
        if any(map(wanted, open_files(pid, fd))) and b"FLOCK" in read(f"/proc/{pid}/fdinfo/{fd}"):
            return True
    return False


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Every visible process at one moment: pid to parent's pid. One scan serves every worker."""

    parents: dict[int, int]

    @classmethod
    def scan(cls) -> ProcessTable:
        return cls({proc.pid: proc.parent for proc in processes()})

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


# --------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of physical memory of one process or several.

    `total_bytes` is their share (PSS: pages are divided among their users), of which `file_bytes` are mapped from files.
    `largest_bytes` is the RSS of the largest of them, which includes all shared pages.
    """

    total_bytes: int = 0
    file_bytes: int = 0
    largest_bytes: int = 0

    @property
    def alone_bytes(self) -> int:
        """The memory of the processes if none shared their pages: exact for one process, else a lower bound."""
        return max(self.total_bytes, self.largest_bytes)

    def __add__(self, other: Resident) -> Resident:
        return Resident(
            self.total_bytes + other.total_bytes,
            self.file_bytes + other.file_bytes,
            max(self.largest_bytes, other.largest_bytes),
        )


def resident(pid: int) -> Resident:
    """The memory of one process; its RSS where the kernel hides its share. Zero if the process is gone."""
    found = _resident_of(f"/proc/{pid}")
    if found.total_bytes:
        return found
    # After the end of its first thread, a process shows its memory only under its other threads.
    others = (_resident_of(f"/proc/{pid}/task/{tid}") for tid in _list_names(f"/proc/{pid}/task") if int(tid) != pid)
    return next((other for other in others if other.total_bytes), Resident())


def _resident_of(folder: str) -> Resident:
    kib = numbers(read(f"{folder}/smaps_rollup"))
    if b"Pss_File" in kib:  # Linux 5.4
        return Resident(kib[b"Pss"] * 1024, kib[b"Pss_File"] * 1024, kib[b"Rss"] * 1024)
    # A process that forbids core dumps hides its maps even from its own user.
    kib = numbers(read(f"{folder}/status"))
    rss = kib.get(b"VmRSS", 0) * 1024
    return Resident(rss, kib.get(b"RssFile", 0) * 1024, rss)


def resident_quickly(pid: int) -> Resident:
    """The process's RSS from the kernel's counters, in constant time; shared memory counts as file pages."""
    statm = read(f"/proc/{pid}/statm").split()
    if not statm:
        return Resident()
    rss = int(statm[1]) * _PAGE
    return Resident(rss, int(statm[2]) * _PAGE, rss)


def bytes_read(pid: int) -> tuple[int, int]:
    """The bytes that a process has read by calls, and from the disk, as it reads mapped files; 0 where unknown."""
    counters = numbers(read(f"/proc/{pid}/io"))
    return counters.get(b"rchar", 0), counters.get(b"read_bytes", 0)


# -------------------------------------------------------------------------------------------------------------- machine


def oom_kills() -> int:
    """How many processes the kernel has killed since boot because memory ran out; 0 where unknown."""
    return numbers(read("/proc/vmstat")).get(b"oom_kill", 0)


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system; `root` is the part of it that is at `point`."""

    root: str
    point: Path
    kind: str
    options: tuple[str, ...]


def mounts(proc: Path = SELF) -> Iterator[Mount]:
    for line in os.fsdecode(read(f"{proc}/mountinfo")).splitlines():
        # ID parent device root point options [optional…] - type source options
        fields, _, rest = line.partition(" - ")
        _, _, _, root, point, *_ = fields.split()
        kind, _, options = rest.split(" ", 2)
        yield Mount(root, Path(point), kind, tuple(options.split(",")))


def groups(proc: Path = SELF) -> Iterator[tuple[str, str]]:
    """The control groups of this process: controllers ("" in version 2) and path."""
    for line in os.fsdecode(read(f"{proc}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers, path


class Listening(NamedTuple):
    """A listening TCP socket. `address`: 4 or 16 bytes in network order."""

    port: int
    inode: int
    address: bytes


def listening(table: str) -> Iterator[Listening]:
    """The listening sockets of /proc/net/`table`."""
    listens = b"0A"
    try:
        with open(f"/proc/net/{table}", "rb") as file:  # noqa: PTH123  # a hot path
            next(file, None)
            for line in file:
                fields = line.split(None, 10)
                if fields[3] != listens:
                    break  # listening sockets come first; the connections after them can be many
                address, _, port = fields[1].partition(b":")
                words = (
                    address[at : at + 8] for at in range(0, len(address), 8)
                )  # numbers of this machine's byte order
                packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
                yield Listening(int(port, 16), int(fields[9]), packed)
    except OSError as error:
        if error.errno in OUR_OWN_TROUBLE:
            raise  # a port must not look free because we ran out of descriptors
        # else the table is missing, for example without IPv6
