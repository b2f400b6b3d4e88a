"""A worker's own temporary folder, which doesn't stay where the worker was killed.

A killed process removes nothing. So each holds a lock on its folder, which the kernel takes back when it ends, and the next
worker of its kind removes folders that nobody holds. Imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def own_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder that begins with `prefix`, locked until this process ends; earlier ones that nobody holds are gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or in use
            _remove(left)
    while True:
        folder = tempfile.TemporaryDirectory(prefix=prefix)
        with suppress(FileNotFoundError):  # another one has just removed it
            lock = _opened(Path(folder.name))
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(folder.name).stat()
            return folder


def _remove(folder: Path) -> None:
    """Raises OSError where somebody holds it, or it isn't ours."""
    lock = _opened(folder)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
