"""Writes a configuration as YAML for people: short values on one line, comments above and beside, quotes only where needed.

The text reads back as the same values: a word that `document` would read differently is quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from supervisor.catalog.document.document import Trail, scalar

WIDTH: Final = 110

_PLAIN = re.compile(r"[A-Za-z_/~.][\w./~+@-]*(?: [\w./~+@-]+)*", re.ASCII)
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+")
_SECTIONS = 2  # levels that are always blocks


@dataclass(frozen=True, slots=True)
class Comments:
    """Comments: lines above an entry, and text beside it."""

    above: Mapping[Trail, Sequence[str]] = field(default_factory=dict)
    beside: Mapping[Trail, str] = field(default_factory=dict)


def to_yaml(document: Mapping[str, JsonValue], comments: Comments | None = None) -> str:
    """The text of a whole file."""
    return "".join(f"{line}\n" for line in _lines_of(document, (), comments or Comments()))


def comment(line: str) -> str:
    """A comment of one line, whatever the text contains."""
    return f"# {_CONTROLS.sub(' ', line)}".rstrip()


def _lines_of(values: Mapping[str, JsonValue], trail: Trail, comments: Comments) -> Iterator[str]:
    pad = "  " * len(trail)
    for number, (key, value) in enumerate(values.items()):
        here = (*trail, key)
        if not trail and number:
            yield ""
        yield from (pad + comment(line) for line in comments.above.get(here, ()))
        head, line = f"{pad}{_scalar_text(key)}:", flow(value)
        beside = f"  {comment(comments.beside[here])}" if here in comments.beside else ""
        is_long = len(head) + len(line) > WIDTH or any(other[: len(here)] == here != other for other in comments.beside)
        if isinstance(value, dict) and value and (len(trail) < _SECTIONS or is_long):
            yield head + beside
            yield from _lines_of(value, here, comments)
        elif isinstance(value, list) and value and is_long:
            yield head + beside
            yield from (f"{pad}  - {flow(item)}" for item in value)
        else:
            yield f"{head} {line}{beside}"


def flow(value: JsonValue) -> str:
    """The value on one line."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_scalar_text(key)}: {flow(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(flow, value)) + "]"
        case str():
            return _scalar_text(value)
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case _:
            return json.dumps(value)


def _scalar_text(text: str) -> str:
    if _PLAIN.fullmatch(text) and scalar(text) == text:
        return text
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
