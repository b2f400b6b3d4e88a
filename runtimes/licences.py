"""The licences of what the runtimes' environments hold, from a file that `make licences` writes.

`copyleft` stands only with licences that ask something of those who pass on works with code under them: `weak` of changes
to the code itself (MPL, LGPL), `strong` of the whole work (GPL, AGPL).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal, NotRequired, TypedDict

from runtimes.pins import pins

FILE: Final = Path(__file__).with_name("licences.json")


class Licence(TypedDict):
    """Of one version of a package."""

    licence: str
    copyleft: NotRequired[Literal["weak", "strong"]]


def known() -> dict[str, Licence]:
    """`name==version` → its licence, for everything that a lock of this project pins."""
    found: dict[str, Licence] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def copyleft(folder: Path) -> dict[str, str]:
    """Packages under strong copyleft that the locks in a runtime's folder pin, for whatever device, with their licences."""
    pinned = pins(folder.glob("requirements*.lock"))
    strong = {pin: told["licence"] for pin, told in known().items() if told.get("copyleft") == "strong"}
    return {pin.partition("==")[0]: licence for pin, licence in strong.items() if pin in pinned}


def notice(name: str, folder: Path) -> str | None:
    """What a person should know before installing the runtime's environment; None: nothing."""
    found = [f"{package} ({licence})" for package, licence in copyleft(folder).items()]
    if not found:
        return None
    return (
        f"{name}: its environment holds packages under strong copyleft licences: {', '.join(found)}. "
        "llmux itself doesn't link them, they run in the worker's process."
    )
