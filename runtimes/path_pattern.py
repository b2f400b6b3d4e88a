"""Paths of a model's own that stand for several: `/files/*`, `/userdata/{file}`.

They are compared with a request's path as it came, so that an escaped slash (`%2F`) is part of a name.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

_WILD: Final = re.compile(r"(\{[^{}/]*\}|[*{}])")


def pattern_of(path: str) -> re.Pattern[bytes] | None:
    """What a request's path must be for it; None where that is the path itself. Raises ValueError for what is no pattern."""
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
    """Does it have parts that a server may take for another folder?"""
    return not {".", ".."}.isdisjoint(re.split(r"[/\\]", unquote(raw_path.decode("latin-1"))))
