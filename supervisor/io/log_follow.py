"""Reads a worker's log while it is written: what is new since the last read, across restarts and truncation.

A start begins the file anew (another file under the same name), and a log over its limit is cut to nothing; both are
noticed by the file's identity and size, and reading goes on at the beginning.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from supervisor.io.logs import cleaned

MOST_BYTES: Final = 256 * 1024  # at one look; of a flood only its end is shown


class LogFollower:
    """Everything here blocks on the file. One reader at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: int | None = None
        self._offset = 0
        self._partial = b""

    def begin(self, lines: int) -> list[str]:
        """At most the last `lines` whole lines of what is there now; `read` goes on after them."""
        try:
            found = self._path.stat()
        except OSError:
            return []
        self._identity, self._offset = found.st_ino, max(0, found.st_size - MOST_BYTES)
        is_cut = self._offset > 0
        there = self.read()
        return there[max(is_cut, len(there) - lines) :]

    def read(self) -> list[str]:
        """The whole lines that came since the last call, cleaned for showing; a line says when some were left out."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._identity or found.st_size < self._offset:
                    self._identity, self._offset, self._partial = found.st_ino, 0, b""
                left_out = max(0, found.st_size - self._offset - MOST_BYTES)
                file.seek(self._offset + left_out)
                data = file.read(MOST_BYTES)
        except OSError:
            return []
        self._offset += left_out + len(data)
        whole, found_end, rest = (self._partial + data if not left_out else data).rpartition(b"\n")
        if not found_end:
            self._partial = rest[-MOST_BYTES:]
            return []
        self._partial = rest
        lines = cleaned(whole.decode("utf-8", "replace"))
        return [f"[{left_out} bytes left out]", *lines] if left_out else lines
