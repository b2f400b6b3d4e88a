"""Which environments this project locks, and which packages each of them holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
UV: Final = str(ROOT / ".venv/bin/uv")

_PIN: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)={2,3}([^\s;]+)", re.MULTILINE)


def environments() -> dict[str, list[Path]]:
    """The locks of llmux itself, of what its developers need, and of each runtime."""
    own = {lock.stem.partition("-")[2] or "llmux": [lock] for lock in _by_stem(ROOT)}
    folders = sorted({lock.parent for lock in ROOT.glob("runtimes/*/requirements*.lock")})
    return own | {folder.name: _by_stem(folder) for folder in folders}


def _by_stem(folder: Path) -> list[Path]:
    return sorted(folder.glob("requirements*.lock"), key=lambda lock: lock.stem)


def pins(locks: Iterable[Path]) -> set[str]:
    """What they pin, as name==version; a build that is pinned with `===`, too."""
    return {f"{name}=={version}" for lock in locks for name, version in _PIN.findall(lock.read_text(encoding="utf-8"))}


def all_pins() -> set[str]:
    """What any lock pins."""
    return {pin for locks in environments().values() for pin in pins(locks)}
