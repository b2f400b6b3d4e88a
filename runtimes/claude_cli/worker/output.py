"""Parsers of a program's output, as it arrives: plain text, or the JSON of Claude's CLI.

With `--output-format json` that is one object, the result. With `stream-json` it is one object a line: `assistant` messages
and, with `--include-partial-messages`, the pieces of these as `stream_event`, in the form of the Messages API; the result is
the last one. Other types of lines, and lines without JSON, are ignored.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

_FINISHED_BY: Final = {"max_tokens": "length", "model_context_window_exceeded": "length", "refusal": "content_filter"}
_MOST_CHARACTERS: Final = 500  # characters of a failure


class OutputError(Exception):
    """The output is no answer. The message may quote the program, so it is for operators only."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts in OpenAI's way: prompt tokens include the cached ones."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result at the end of an output."""

    text: str  # text that `feed` has not returned before
    finish_reason: str = "stop"
    usage: Usage | None = None


class Output(Protocol):
    """A parser of one program's output."""

    def feed(self, data: bytes) -> str:
        """Parse a further piece. Returns its text of the answer. Raises OutputError."""

    def end(self) -> Result:
        """Call at the end of the output. Returns the result. Raises OutputError if there was no answer."""


class Text:
    """The format of plain text: the whole output is the answer, without blanks at its end."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._blanks: list[str] = []  # may be the end

    def feed(self, data: bytes) -> str:
        """See `Output`."""
        text = self._decoder.decode(data)
        kept = text.rstrip()
        blanks = self._blanks
        if not kept:
            blanks.append(text)
            return ""
        self._blanks = [text[len(kept) :]]
        return "".join((*blanks, kept))

    def end(self) -> Result:
        """See `Output`."""
        return Result("".join((*self._blanks, self._decoder.decode(b"", final=True))).rstrip())


class ClaudeJson:
    """The format with one JSON object, complete at the end."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> str:
        """See `Output`."""
        self._data += data
        return ""

    def end(self) -> Result:
        """See `Output`."""
        found = _json_object(bytes(self._data))
        if found is None or found.get("type") != "result":
            raise OutputError("its output is not the JSON of a result")
        return _parse_result(found, given=False)


class ClaudeStreamJson:
    """The format with one JSON object a line."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._has_pieces = False  # then complete messages repeat the pieces
        self._has_text = False
        self._result: Mapping[str, object] | None = None

    def feed(self, data: bytes) -> str:
        """See `Output`."""
        *lines, rest = data.split(b"\n")
        texts = []
        for line in lines:
            self._line += line
            texts.append(self._read_line(bytes(self._line)))
            self._line.clear()
        self._line += rest
        text = "".join(texts)
        self._has_text = self._has_text or bool(text)
        return text

    def end(self) -> Result:
        """See `Output`."""
        last = self.feed(b"\n")
        if self._result is None:
            raise OutputError("its output ended without a result")
        result = _parse_result(self._result, given=self._has_text)
        return Result(last + result.text, result.finish_reason, result.usage)

    def _read_line(self, line: bytes) -> str:
        found = _json_object(line)
        if found is None or found.get("parent_tool_use_id") is not None:  # a message between parts of the program
            return ""
        match found:
            case {"type": "stream_event", "event": {"type": "content_block_delta", "delta": {"text": str(text)}}}:
                self._has_pieces = True
                return text
            case {"type": "assistant", "message": {"content": list(content)}} if not self._has_pieces:
                return "".join(
                    block["text"]
                    for block in content
                    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
                )
            case {"type": "result"}:
                self._result = found
        return ""


OUTPUTS: Final[Mapping[str, Callable[[], Output]]] = {
    "text": Text,
    "claude_json": ClaudeJson,
    "claude_stream_json": ClaudeStreamJson,
}
"""Name in the configuration → parser."""


def _json_object(data: bytes) -> dict[str, object] | None:
    """The JSON object in `data`, behind a terminal's control characters, if there are any."""
    start = data.find(b"{")
    try:
        found = json.loads(data[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parse_result(found: Mapping[str, object], *, given: bool) -> Result:
    text, subtype = found.get("result"), found.get("subtype")
    if found.get("is_error") is True or (isinstance(subtype, str) and subtype.startswith("error")):
        raise OutputError(f"its result is an error: {str(text or subtype)[:_MOST_CHARACTERS]}")
    if not given and not isinstance(text, str):
        raise OutputError("its result holds no text")
    reason = found.get("stop_reason")
    return Result(
        "" if given or not isinstance(text, str) else text,
        _FINISHED_BY.get(reason, "stop") if isinstance(reason, str) else "stop",
        _parse_usage(found.get("usage")),
    )


def _parse_usage(found: object) -> Usage | None:
    if not isinstance(found, dict):
        return None
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    counts = [value if isinstance(value := found.get(name), int) and value >= 0 else 0 for name in names]
    new, written, cached, completion = counts
    return Usage(new + written + cached, cached, completion)
