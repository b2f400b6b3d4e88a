"""A call as tags, `<function=name><parameter=key>value</parameter></function>`, converted to JSON as it comes.

A parameter's type comes from the function's schema: strings are streamed, other values are output when complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from runtimes.transformers.worker.chat.formats.pieces import (
    CallArguments,
    CallStart,
    Piece,
    Schemas,
    earliest,
    partial_marker,
)

_ENDS = ("</parameter>", "\n<parameter=", "\n</function>")  # models sometimes omit the closing tag
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class XmlCall:
    """Takes text; `done` once the function has ended, `rest` is the text after it."""

    def __init__(self, index: int, schemas: Schemas) -> None:
        self._index, self._schemas = index, schemas
        self._buffer = self._value = ""
        self._state = "function"  # function, between, value
        self._types: frozenset[str] = frozenset()
        self._first = True
        self.raw = ""
        self.rest = ""
        self.name: str | None = None
        self.done = False

    def feed(self, text: str) -> Iterator[Piece]:
        """The next text."""
        self.raw += text
        self._buffer += text
        while not self.done:
            before = (self._state, len(self._buffer))
            match self._state:
                case "function":
                    yield from self._read_function()
                case "between":
                    yield from self._read_between()
                case _:
                    yield from self._read_value(last=False)
            if before == (self._state, len(self._buffer)):
                return

    def end(self) -> Iterator[Piece]:
        """The text has ended."""
        if self._state == "value" and not self.done:
            yield from self._read_value(last=True)

    def _read_function(self) -> Iterator[Piece]:
        start, stop = self._buffer.find("<function="), self._buffer.find(">")
        if 0 <= start < stop:
            self.name = self._buffer[start + len("<function=") : stop].strip()
            self._buffer, self._state = self._buffer[stop + 1 :], "between"
            yield CallStart(self._index, self.name)

    def _read_between(self) -> Iterator[Piece]:
        found = earliest(self._buffer, ("<parameter=", "</function>"))
        if found is None:
            return
        at, tag = found
        if tag == "</function>":
            self.rest, self._buffer, self.done = self._buffer[at + len(tag) :], "", True
            yield CallArguments(self._index, "{}" if self._first else "}")
            return
        stop = self._buffer.find(">", at)
        if stop < 0:
            return
        key = self._buffer[at + len(tag) : stop].strip()
        self._types, self._value = self._types_of(key), ""
        self._buffer, self._state = self._buffer[stop + 1 :], "value"
        lead = "{" if self._first else ", "
        self._first = False
        yield CallArguments(self._index, f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        if self._is_text:
            yield CallArguments(self._index, '"')

    def _read_value(self, *, last: bool) -> Iterator[Piece]:
        found = earliest(self._buffer, _ENDS)
        if found is not None:
            cut = found[0]
        elif last:
            cut = len(self._buffer)
        else:
            cut = len(self._buffer) - max(
                partial_marker(self._buffer, _ENDS), partial_marker(self._buffer, ("\n</parameter>",))
            )
        piece, self._buffer = self._buffer[:cut], self._buffer[cut:]
        if not self._value and (piece or found is not None):
            self._value = "\n"  # the line break after the tag has been skipped
            piece = piece.removeprefix("\n")
        if found is not None and found[1] == "</parameter>":
            piece = piece.removesuffix("\n")
            self._buffer = self._buffer[len(found[1]) :]
        if self._is_text:
            if piece:
                yield CallArguments(self._index, json.dumps(piece, ensure_ascii=False)[1:-1])
        else:
            self._value += piece
        if found is not None:
            self._state = "between"
            yield CallArguments(self._index, '"' if self._is_text else self._json(self._value[1:]))

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _types_of(self, key: str) -> frozenset[str]:
        """JSON types that the function's schema allows; empty if unknown."""
        properties = self._schemas.get(self.name or "", {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema))

    def _json(self, value: str) -> str:
        try:
            text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
            parsed = json.loads(text, parse_constant=_refuse)
        except ValueError:
            return json.dumps(value, ensure_ascii=False)
        fits = not self._types or any(
            isinstance(parsed, _TYPES.get(name, ())) and not (isinstance(parsed, bool) and name != "boolean")
            for name in self._types
        )
        return json.dumps(parsed if fits else value, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are not JSON


def _types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (item for item in kind if isinstance(item, str))
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list):
            for branch in branches:
                yield from _types(branch)
