"""Files shared with other processes: replaced as a whole, and locked."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file to fill in the block; then it replaces `path` in one step, synced to disk, unless the block raises.

    Raises OSError, with the path also where the disk is full.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        pid = left.name.rsplit(".", 2)[1]
        if left == aside or (pid.isdecimal() and not Path("/proc", pid).exists()):  # its writer was killed
            left.unlink(missing_ok=True)
    os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def create(path: Path, text: str) -> None:
    """Create a file with this text, for its owner alone: whole, or not at all. Raises OSError, also if the file exists."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, 0o600) as fresh:
        fresh.write_text(text, encoding="utf-8")


def rewrite(path: Path, text: str) -> None:
    """Replace the file's text. The mode stays; of a link, the target is replaced. Raises OSError."""
    real = path.resolve()
    with replacing(real, 0o600) as fresh:
        fresh.write_bytes(text.encode())
        fresh.chmod(stat.S_IMODE(real.stat().st_mode))


def refusal(folder: Path) -> OSError | None:
    """The reason why this folder, or the nearest existing one above it, isn't writable; None: it is."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    is_fixed = os.statvfs(there).f_flag & os.ST_RDONLY
    number = errno.EROFS if is_fixed else errno.EACCES if there.is_dir() else errno.ENOTDIR
    return OSError(number, os.strerror(number), str(there))


def move_aside(path: Path, *suffixes: str) -> Path:
    """Rename a damaged file, and its siblings with these suffixes, to `….broken-TIME`; returns the new name."""
    aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
    for suffix in ("", *suffixes):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(f"{aside}{suffix}")
    return aside


def lock(file: BinaryIO | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed here and in every process that inherited it.

    False: another process holds the lock. Raises OSError where the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create the folder and lock it within the block, if the file system has locks: one process at a time."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, waiting: Callable[[], object]) -> Iterator[bool]:
    """Lock the file within the block: one process at a time. Calls `waiting` before a wait; yields whether it waited."""
    with path.open("wb") as file:
        waits = not lock(file)
        if waits:
            waiting()
            lock(file, wait=True)
        yield waits
