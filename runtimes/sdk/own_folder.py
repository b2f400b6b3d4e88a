"""A worker's own temporary folder, which is cleaned up even if the worker is killed.

A killed process removes nothing. So each worker locks its folder. The kernel releases the lock when the worker ends, and the
next worker of its kind removes folders without a lock. Imports only the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnFolder:
    """A new folder whose name begins with `prefix`, locked until it is closed or the process ends."""

    def __init__(self, prefix: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if (lock := _try_lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            if (own := _try_lock(self.path)) is not None:
                break  # else another starting worker has removed it as a leftover
        self._lock = own

    def hold_through_exec(self) -> None:
        """Keep the lock through `exec`: until the new program and all its children have ended."""
        os.set_inheritable(self._lock, True)

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None: another process holds it, or the folder is gone or another user's."""
    try:
        lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        return None
    if os.fstat(lock_fd).st_uid == os.getuid() and folder.exists():
        return lock_fd
    os.close(lock_fd)
    return None
