"""The worker's own folder, for what clients send and get.

It is locked while the worker lives. What a killed one left, the next one deletes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "llmux-comfy-"
KINDS: Final = ("input", "output", "temp")


class Folder:
    """Made at once, with a folder for each kind in it."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (own := _locked(self.path)) is not None:
                break  # else another one that begins has taken it for a leftover
        self._lock = own
        for kind in KINDS:
            (self.path / kind).mkdir()

    def clear(self) -> None:
        """Delete all files in it."""
        for path in self.path.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds it until it is closed, at the latest with the process; None where another does, or it has gone."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    if folder.exists():
        return held
    os.close(held)
    return None
