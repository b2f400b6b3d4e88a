"""The last versions of a text file, each in a file of its own, so that a user can restore one."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from pathlib import Path
from typing import Final

from supervisor.host.store import files
from supervisor.schema.edit import Version

MOST: Final = 11
"""Ten versions to restore, and the current one."""
_NAME: Final = re.compile(r"(\d{13})-([0-9a-f]{16})")


def digest(text: str) -> str:
    """The text's digest, the same only for the same text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Versions:
    """A folder of versions. Use from any thread; every method blocks on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def keep(self, text: str) -> None:
        """Keep the text, unless it is the newest version already, and delete the oldest version. Raises OSError."""
        with self._lock:
            there = self._list_versions()
            if there and there[0].id.endswith(digest(text)):
                return
            last_ms = int(there[0].id.partition("-")[0]) if there else 0
            now_ms = max(time.time_ns() // 1_000_000, last_ms + 1)  # also where the clock went back
            files.create(self._folder / f"{now_ms:013}-{digest(text)}", text)
            for old in there[MOST - 1 :]:
                (self._folder / old.id).unlink(missing_ok=True)

    def listing(self) -> list[Version]:
        """All versions, the newest first. Raises OSError."""
        with self._lock:
            return self._list_versions()

    def _list_versions(self) -> list[Version]:
        if not self._folder.is_dir():
            return []
        found = [(path, match) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name)) is not None]
        versions = [Version(path.name, int(match[1]) / 1000, path.stat().st_size) for path, match in found]
        return sorted(versions, key=lambda version: version.id, reverse=True)

    def read(self, wanted: str) -> str | None:
        """The text of the version with this name; None: there is none. Raises OSError."""
        with self._lock:
            known = any(version.id == wanted for version in self._list_versions())
            return (self._folder / wanted).read_bytes().decode() if known else None
