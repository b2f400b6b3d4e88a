"""The bodies of a model's last requests, each in a file of its own, for their owner alone."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from supervisor.io import files

MOST: Final = 100
"""Of one model; the oldest go."""
_NAME: Final = re.compile(r"(\d{13})-([0-9a-f]+-\d+)\.json")


class KeptBodies:
    """A folder with a folder for each model. Everything blocks on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, model: str, number: str, text: str) -> None:
        """Keep this of the request with this number. Raises OSError."""
        folder = self._of(model)
        files.create(folder / f"{time.time_ns() // 1_000_000:013}-{number}.json", text)
        there = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
        for old in there[:-MOST]:
            old.unlink(missing_ok=True)

    def find(self, number: str) -> str | None:
        """What was kept of the request with this number; None: nothing. Raises OSError."""
        if not re.fullmatch(r"[0-9a-f]+-\d+", number):
            return None
        found = next(self._folder.glob(f"*/*-{number}.json"), None)
        return None if found is None else found.read_text(encoding="utf-8")

    def limit_to(self, models: Collection[str]) -> None:
        """Delete what was kept of all other models."""
        mine = {self._of(model) for model in models}
        with contextlib.suppress(FileNotFoundError):
            for folder in self._folder.iterdir():
                if folder not in mine:
                    shutil.rmtree(folder, ignore_errors=True)

    def _of(self, model: str) -> Path:
        return self._folder / hashlib.sha256(model.encode()).hexdigest()[:16]
