"""llama-swap's macros: `${name}` anywhere in a value, defined for all models or for one, and in terms of each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pydantic import JsonValue

from supervisor.cli.importers.draft import text_of

LATER: Final = frozenset({"PORT", "PID"})
"""Known only when a worker is started: these stay."""

_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_DEPTH = 16

Definitions = Mapping[str, JsonValue]


def definitions(value: JsonValue) -> dict[str, JsonValue]:
    """The macros of a `macros:` key: a mapping, or a list of mappings."""
    match value:
        case dict():
            return value
        case list():
            return {key: item for entry in value if isinstance(entry, dict) for key, item in entry.items()}
        case _:
            return {}


class Macros:
    """Fills them in. `problems` are those that llama-swap would refuse, too."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._environ = environ

    def fill(self, value: JsonValue, known: Definitions, where: str) -> JsonValue:
        """The value with all macros filled in; what is a macro as a whole becomes what the macro is."""
        match value:
            case str():
                return self._text(value, known, where)
            case list():
                return [self.fill(item, known, where) for item in value]
            case dict():
                return {str(self.fill(key, known, where)): self.fill(item, known, where) for key, item in value.items()}
            case _:
                return value

    def _text(self, text: str, known: Definitions, where: str) -> JsonValue:
        if (whole := _MACRO.fullmatch(text)) and not isinstance(known.get(whole[1]), str | None):
            return known[whole[1]]
        for _ in range(_DEPTH):
            filled = _MACRO.sub(lambda match: self._one(match[1], known, where), text)
            if filled == text:
                return text
            text = filled
        self.problems.append(f"{where}: macros that contain each other")
        return text

    def _one(self, name: str, known: Definitions, where: str) -> str:
        if name in LATER:
            return f"${{{name}}}"
        if name in known:
            return text_of(known[name])
        variable = name.removeprefix("env.")
        if variable in self._environ and variable != name:
            return self._environ[variable]
        what = f"there is no macro {name}" if variable == name else f"the environment variable {variable} is not set"
        self.problems.append(f"{where}: {what}")
        return ""
