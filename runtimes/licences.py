"""The licences of the packages in the runtimes' environments, from a file that `make licences` writes.

`copyleft` marks licences that bind those who redistribute the code: `weak` for changes to the code itself (MPL, LGPL),
`strong` for the whole work (GPL, AGPL).
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Final, Literal, NotRequired, TypedDict

from runtimes.pins import pins

FILE: Final = Path(__file__).with_name("licences.json")


class Licence(TypedDict):
    """The licence of one version of a package."""

    licence: str
    copyleft: NotRequired[Literal["weak", "strong"]]


def known() -> dict[str, Licence]:
    """`name==version` → its licence, for everything that this project's locks pin."""
    found: dict[str, Licence] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def copyleft(folder: Path, *, built: bool = True) -> dict[str, str]:
    """Packages under strong copyleft that any lock in a runtime's folder pins for this machine, with their licences.

    `built`: include the lock of packages that are compiled on the machine.
    """
    locks = (lock for lock in folder.glob("requirements*.lock") if built or lock.stem != "requirements-build")
    pinned = pins(locks, machine=platform.machine())
    strong = {pin: entry["licence"] for pin, entry in known().items() if entry.get("copyleft") == "strong"}
    return {pin.partition("==")[0]: licence for pin, licence in strong.items() if pin in pinned}


def notice(name: str, folder: Path, *, built: bool = False) -> str | None:
    """The licence notice before an installation of the runtime's environment; None: no notice. `built`: see `copyleft`."""
    found = [f"{package} ({licence})" for package, licence in copyleft(folder, built=built).items()]
    if not found:
        return None
    return (
        f"{name}: its environment holds packages under strong copyleft licences: {', '.join(found)}. "
        "llmux itself doesn't link them, they run in the worker's process."
    )
