"""The environments that this project locks, and the packages of each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runtimes.pins import pins

ROOT: Final = Path(__file__).parent.parent
UV: Final = str(ROOT / ".venv/bin/uv")


def environments() -> dict[str, list[Path]]:
    """Environment → its locks: llmux, the developers' tools, and each runtime."""
    own = {lock.stem.partition("-")[2] or "llmux": [lock] for lock in _locks_by_stem(ROOT)}
    folders = sorted({lock.parent for lock in ROOT.glob("runtimes/*/requirements*.lock")})
    return own | {folder.name: _locks_by_stem(folder) for folder in folders}


def _locks_by_stem(folder: Path) -> list[Path]:
    return sorted(folder.glob("requirements*.lock"), key=lambda lock: lock.stem)


def all_pins() -> set[str]:
    """The pins of all locks."""
    return {pin for locks in environments().values() for pin in pins(locks)}
