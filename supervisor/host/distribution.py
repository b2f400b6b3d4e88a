"""llmux as an installed distribution: its version, and whether its import names are its own.

Other packages on PyPI are imported as `supervisor` and `runtimes`, too. Installed beside llmux they overwrite its two
`__init__.py`. These contain only a docstring, so llmux still runs far enough to report the conflict.
"""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError
from typing import Final

from supervisor.errors import LlmuxError

NAME: Final = "llmux-supervisor"
IMPORT_NAMES: Final = ("supervisor", "runtimes")
REMEDY: Final = (
    f"install llmux into an environment of its own (uv tool install, or pipx install); here: pip uninstall {NAME}, then "
    "install the other package again"
)


class NameTakenError(LlmuxError):
    """Another distribution has an import name of llmux."""

    code = "name_taken"


def version() -> str:
    """The installed version. Takes milliseconds."""
    return importlib.metadata.version(NAME)


def name_clashes() -> tuple[str, ...]:
    """The other distributions installed here under an import name of llmux. Takes milliseconds."""
    found = []
    for name in IMPORT_NAMES:
        try:
            place = importlib.metadata.distribution(name).locate_file("")
        except PackageNotFoundError:
            continue
        found.append(f"the package {name}, installed in {place}, has an import name that llmux needs itself")
    return tuple(found)


def refuse_name_clashes() -> None:
    """Raises NameTakenError, with the remedy, if another distribution has an import name of llmux."""
    if clashes := name_clashes():
        raise NameTakenError(f"{'; '.join(clashes)}. Remedy: {REMEDY}")
