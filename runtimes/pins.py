"""The packages that lock files pin."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_PIN: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)={2,3}([^\s;]+)(.*)", re.MULTILINE)
_MACHINE: Final = re.compile(r"platform_machine == '(\w+)'")


def pins(locks: Iterable[Path], *, machine: str | None = None) -> set[str]:
    """Every pinned package as `name==version`, also where a lock pins one build with `===`.

    `machine`: leave out packages that are only for other machines, such as aarch64.
    """
    found = (entry for lock in locks for entry in _PIN.findall(lock.read_text(encoding="utf-8")))
    return {f"{name}=={version}" for name, version, marker in found if _is_for(marker, machine)}


def _is_for(marker: str, machine: str | None) -> bool:
    named = _MACHINE.findall(marker)
    return machine is None or not named or machine in named
