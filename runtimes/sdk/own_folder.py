"""A worker's own temporary folder, which doesn't stay where the worker was killed.

A killed process removes nothing. So each holds a lock on its folder, which the kernel takes back when it ends, and the next
worker of its kind removes folders that nobody holds. Imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnFolder:
    """A new folder whose name begins with `prefix`, held until it is closed, at the latest with the process."""

    def __init__(self, prefix: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            if (own := _locked(self.path)) is not None:
                break  # else another one that begins has taken it for a leftover
        self._lock = own

    def hold_through_exec(self) -> None:
        """From now on hold it until the program that this process becomes has ended, with all that it starts."""
        os.set_inheritable(self._lock, True)

    def close(self) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds it; None where another one does, or it has gone, or is another user's."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    if os.fstat(held).st_uid == os.getuid() and folder.exists():
        return held
    os.close(held)
    return None
