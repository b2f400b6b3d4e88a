"""Parses a call written as one JSON object, `{"name": …, "arguments": …}`. The arguments are streamed."""

from __future__ import annotations

import json
from collections.abc import Callable

from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart
from runtimes.sdk.chat.formats.reader import Reader, Reading

_ARGUMENTS = ("arguments", "parameters")


class CallEndedError(Exception):
    """The text ended within a call, or its block ended before the name."""


class JsonCall:
    """One call. `raw` is all text read so far: the caller outputs it if it is no call. `closing` ends the block."""

    def __init__(self, reader: Reader, index: int, closing: str) -> None:
        self._reader, self._index, self._closing = reader, index, closing
        self._has_arguments = False
        self.raw = ""
        self.name: str | None = None

    def read(self) -> Reading[None]:
        """Read the object. Raises CallEndedError."""
        early = ""  # arguments before the name
        yield from self._skip_to("{")
        while (yield from self._skip_to('"}')) == '"':
            key = yield from self._read_key()
            yield from self._skip_to(":")
            streamed = key in _ARGUMENTS and self.name is not None
            value = yield from self._read_value(self._output_arguments if streamed else None)
            text = _string_content(value)
            if key == "name" and self.name is None and text is not None:
                self.name = text
                self._reader.out.append(CallStart(self._index, text))
                self._output_arguments(early)
            elif key in _ARGUMENTS and value.startswith('"'):
                early = early if text is None else text  # JSON within a string
                self._output_arguments(text or "")
            elif key in _ARGUMENTS:
                early = value
            if (yield from self._skip_to(",}")) == "}":
                break
        if not self._has_arguments:
            self._output_arguments("{}")

    def _output_arguments(self, text: str) -> None:
        if text and self.name is not None:
            self._has_arguments = True
            self._reader.out.append(CallArguments(self._index, text))

    def _read_char(self) -> Reading[str]:
        if self.name is None and self.raw.endswith(self._closing):
            raise CallEndedError
        while not self._reader.buffer:
            if self._reader.ended:
                raise CallEndedError
            yield
        char, self._reader.buffer = self._reader.buffer[0], self._reader.buffer[1:]
        self.raw += char
        return char

    def _skip_to(self, wanted: str) -> Reading[str]:
        """Read up to the first of these characters."""
        while (char := (yield from self._read_char())) not in wanted:
            pass
        return char

    def _read_key(self) -> Reading[str]:
        key, escaped = "", False
        while (char := (yield from self._read_char())) != '"' or escaped:
            key += char
            escaped = char == "\\" and not escaped
        return key

    def _read_value(self, output: Callable[[str], None] | None) -> Reading[str]:
        """Read a value, and return its raw text. Any value but a string is also passed to `output` while it arrives."""
        value, char, depth, quoted, escaped = "", "", 0, False, False
        while not value or depth or quoted or char not in '"}]':
            char = yield from self._read_char()
            if quoted:
                quoted = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif depth == 0 and not value and char.isspace():
                continue
            elif depth == 0 and (char in ",}" or char.isspace()):  # after a number or a literal
                self._reader.buffer, self.raw = char + self._reader.buffer, self.raw[:-1]
                break
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
            value += char
            if output is not None and not value.startswith('"'):
                output(char)
        return value


def _string_content(value: str) -> str | None:
    """The content of a JSON string; None for any other JSON."""
    try:
        return str(json.loads(value)) if value.startswith('"') else None
    except ValueError:
        return None
