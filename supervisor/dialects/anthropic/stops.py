"""Corrects the reason for an answer's end, for workers that serve `/v1/messages` themselves.

llama.cpp's server reports the `stop_sequence` that ended an answer, but with the wrong `stop_reason`: `end_turn`. Clients look
at the `stop_reason` first.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects.buffered_response import BufferedResponse

LINE_LIMIT: Final = 4 * 1024 * 1024  # a stream with a longer line passes unchanged
_EVENT: Final = b'"message_delta"'
_WRONG: Final = re.compile(rb'("stop_reason"\s*:\s*)"end_turn"(\s*,\s*"stop_sequence"\s*:\s*")')
_END: Final = b'"end_turn"'
_RIGHT: Final = b'"stop_sequence"'


class WholeStop(BufferedResponse):
    """Corrects a whole answer."""

    def changed(self, fields: Fields) -> Fields | None:
        """See BufferedResponse."""
        reason, sequence = (bytes(fields.get(name, b"")) for name in ("stop_reason", "stop_sequence"))
        is_wrong = reason == _END and sequence.startswith(b'"')
        return fields | {"stop_reason": msgspec.Raw(_RIGHT)} if is_wrong else None


class StreamedStop:
    """Corrects a stream, line by line: an event's data is one line, and quotes within its texts are escaped."""

    def __init__(self) -> None:
        self._incomplete_line = b""

    @property
    def gathered(self) -> int:
        """See StreamTranslation."""
        return len(self._incomplete_line)

    def feed(self, piece: bytes) -> bytes:
        """The complete lines so far."""
        text = self._incomplete_line + piece
        cut = text.rfind(b"\n") + 1
        if len(text) - cut > LINE_LIMIT:
            cut = len(text)
        lines, self._incomplete_line = text[:cut], text[cut:]
        return _WRONG.sub(rb"\g<1>" + _RIGHT + rb"\g<2>", lines) if _EVENT in lines else lines

    def end(self) -> bytes:
        """The incomplete last line."""
        rest, self._incomplete_line = self._incomplete_line, b""
        return rest
