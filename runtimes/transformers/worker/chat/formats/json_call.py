"""A call as one JSON object, `{"name": …, "arguments": …}`, whose arguments are streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator

from runtimes.transformers.worker.chat.formats.pieces import CallArguments, CallStart, Piece

_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Takes single characters; `done` once the object has ended.

    `raw` is its whole input, which the caller outputs as text if it was no call.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._state = "before"  # before, key, colon, value, after
        self._key = self._value = self._arguments = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.raw = ""
        self.name: str | None = None
        self.done = False

    def feed(self, char: str) -> Iterator[Piece]:
        """The next character."""
        self.raw += char
        match self._state:
            case "before":
                self._state = "key" if char == "{" else "before"
            case "key":
                yield from self._read_key(char)
            case "colon":
                self._state = "value" if char == ":" else "colon"
            case "value":
                yield from self._read_value(char)
            case _:
                yield from self._after(char)

    def end(self) -> Iterator[Piece]:
        """The text has ended."""
        if self.name is not None and not self._arguments:
            yield from self._give("{}" if self.done else "")

    def _read_key(self, char: str) -> Iterator[Piece]:
        if self._in_string:
            if char == '"' and not self._escaped:
                self._in_string, self._state = False, "colon"
            else:
                self._key += char
                self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._key, self._in_string, self._escaped = "", True, False
        elif char == "}":
            self.done = True
            yield from self.end()

    def _read_value(self, char: str) -> Iterator[Piece]:
        if not self._value and char.isspace():
            return
        closed = False
        if self._in_string:
            closed = char == '"' and not self._escaped and self._depth == 0
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string, self._escaped = True, False
        elif char in "{[":
            self._depth += 1
        elif self._depth == 0 and (char in ",}" or char.isspace()):  # after a number or a literal
            yield from self._end_value()
            yield from self._after(char)
            return
        elif char in "}]":
            self._depth -= 1
            closed = self._depth == 0
        self._value += char
        if self._key in _ARGUMENTS and self.name is not None and not self._value.startswith('"'):
            yield from self._give(char)
        if closed:
            yield from self._end_value()

    def _end_value(self) -> Iterator[Piece]:
        value, self._value, self._state = self._value, "", "after"
        if self._key == "name" and self.name is None:
            try:
                name = json.loads(value)
            except ValueError:
                return
            if isinstance(name, str):
                self.name = name
                yield CallStart(self._index, name)
                early, self._arguments = self._arguments, ""
                yield from self._give(early)
        elif self._key in _ARGUMENTS:
            if value.startswith('"'):  # JSON within a string
                try:
                    value = str(json.loads(value))
                except ValueError:
                    return
            elif self.name is not None:
                return  # streamed already
            if self.name is None:
                self._arguments = value
            else:
                yield from self._give(value)

    def _after(self, char: str) -> Iterator[Piece]:
        if char == ",":
            self._state = "key"
        elif char == "}":
            self.done = True
            yield from self.end()

    def _give(self, text: str) -> Iterator[Piece]:
        self._arguments += text
        if text:
            yield CallArguments(self._index, text)
