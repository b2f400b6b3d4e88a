"""Patterns among a model's own paths: `/files/*`, `/userdata/{file}`.

A pattern is compared with the request's raw path, so an escaped slash (`%2F`) is part of a name.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

_WILD: Final = re.compile(r"(\{[^{}/]*\}|[*{}])")


def pattern_of(path: str) -> re.Pattern[bytes] | None:
    """The regular expression for a pattern; None for a plain path. Raises ValueError for an invalid pattern."""
    if not _WILD.search(path) and "%" not in path:
        return None
    found = b""
    for place, piece in enumerate(pieces := _WILD.split(path)):
        if piece == "*":
            if place != len(pieces) - 2 or pieces[-1]:
                raise ValueError(f"{path}: * stands for the rest of a path, at its end")
            found += rb".*"
        elif piece in {"{", "}", "{}"}:
            raise ValueError(f"{path}: a part of a path that may be anything is written {{name}}")
        else:
            found += rb"[^/]+" if _WILD.fullmatch(piece) else re.escape(piece.encode())
    return re.compile(found, re.DOTALL)


def leaves_its_folder(raw_path: bytes) -> bool:
    """Does the path have parts, such as `..`, that a server may resolve to another folder?"""
    return not {".", ".."}.isdisjoint(re.split(r"[/\\]", unquote(raw_path.decode("latin-1"))))
