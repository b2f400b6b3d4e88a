"""Which environments this project locks, and which packages each of them holds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runtimes.pins import pins

ROOT: Final = Path(__file__).parent.parent
UV: Final = str(ROOT / ".venv/bin/uv")


def environments() -> dict[str, list[Path]]:
    """The locks of llmux itself, of what its developers need, and of each runtime."""
    own = {lock.stem.partition("-")[2] or "llmux": [lock] for lock in _locks_by_stem(ROOT)}
    folders = sorted({lock.parent for lock in ROOT.glob("runtimes/*/requirements*.lock")})
    return own | {folder.name: _locks_by_stem(folder) for folder in folders}


def _locks_by_stem(folder: Path) -> list[Path]:
    return sorted(folder.glob("requirements*.lock"), key=lambda lock: lock.stem)


def all_pins() -> set[str]:
    """What any lock pins."""
    return {pin for locks in environments().values() for pin in pins(locks)}
