"""The packages that lock files pin."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_PIN: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)={2,3}([^\s;]+)", re.MULTILINE)


def pins(locks: Iterable[Path]) -> set[str]:
    """Every pinned package as `name==version`, also where a lock pins one build with `===`."""
    return {f"{name}=={version}" for lock in locks for name, version in _PIN.findall(lock.read_text(encoding="utf-8"))}
