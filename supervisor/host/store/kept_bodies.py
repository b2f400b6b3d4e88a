"""The bodies of a model's last requests, each in a file of its own, for their owner alone."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from supervisor.host.store import files

MOST: Final = 100
"""The most bodies of one model; the oldest go first."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of all models together; the oldest bodies go first."""
_NAME: Final = re.compile(r"(\d{13})-([0-9a-f]+-\d+)\.json")


class KeptBodies:
    """A folder with a folder for each model. Every method blocks on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.models: Collection[str] = frozenset()  # the models that may have bodies here

    def keep(self, model: str, number: str, text: str) -> None:
        """Keep the text as the bodies of the request with this number, if its model still allows that. Raises OSError."""
        with self._lock:
            if model not in self.models:
                return
            folder = self._folder_of(model)
            files.create(folder / f"{time.time_ns() // 1_000_000:013}-{number}.json", text)
            there = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
            for old in there[:-MOST]:
                old.unlink(missing_ok=True)
            self._delete_beyond(MOST_BYTES)

    def _delete_beyond(self, most: int) -> None:
        sizes = {path: path.stat().st_size for path in self._folder.glob("*/*.json")}
        total = sum(sizes.values())
        for path in sorted(sizes, key=lambda path: path.name):
            if total <= most:
                return
            path.unlink(missing_ok=True)
            total -= sizes[path]

    def find(self, number: str) -> str | None:
        """The kept bodies of the request with this number; None: none were kept. Raises OSError."""
        if not re.fullmatch(r"[0-9a-f]+-\d+", number):
            return None
        found = next(self._folder.glob(f"*/*-{number}.json"), None)
        return None if found is None else found.read_text(encoding="utf-8")

    def delete_others(self) -> None:
        """Delete the bodies of all models that are not in `models`."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            mine = {self._folder_of(model) for model in self.models}
            for folder in self._folder.iterdir():
                if folder not in mine:
                    shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, model: str) -> Path:
        return self._folder / hashlib.sha256(model.encode()).hexdigest()[:16]
