"""Adds missing fields to the streams of workers that serve `/v1/responses` themselves.

llama.cpp's server, which may run as a `command`, leaves out the events' numbers and positions, and `output` of a new response.
OpenAI's own SDKs fail on such a stream, so llmux inserts the missing fields, without parsing the events.
"""

from __future__ import annotations

import re
import time
from typing import Final

import msgspec

EVENT_LIMIT: Final = 4 * 1024 * 1024  # a stream with a longer event passes unchanged
NUMBER: Final = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})\b')
_ITEM: Final = b'"item_id":"'
_ID: Final = b'"id":"'
_BEGINS: Final = b'"response":{'
_FRAME: Final = b"\n\n"
_DATA: Final = b"data: {"
_TEXT: Final = b'"type":"response.output_text.'


class ResponsesRepair:
    """Adds the missing fields to all events of a stream if the first event has no number."""

    def __init__(self, model: str) -> None:
        self._start_fields = {"created_at": int(time.time()), "model": model, "output": []}
        self._incomplete_event = b""
        self._number = 0
        self._items: dict[bytes, int] = {}  # id → position in the output
        self._passes = False

    @property
    def gathered(self) -> int:
        """See StreamTranslation."""
        return len(self._incomplete_event)

    def feed(self, piece: bytes) -> bytes:
        """The complete events so far."""
        if b"\r\n" in piece:  # not llama.cpp's stream; and `feed` wouldn't find the events' ends
            self._passes = True
        if self._passes:
            return self.end() + piece
        *events, self._incomplete_event = (self._incomplete_event + piece).split(_FRAME)
        whole = b"".join([self._with_missing_fields(event) + _FRAME for event in events])
        if self._passes or len(self._incomplete_event) > EVENT_LIMIT:
            self._passes = True
            return whole + self.end()
        return whole

    def end(self) -> bytes:
        """The incomplete last event."""
        rest, self._incomplete_event = self._incomplete_event, b""
        return rest

    def _with_missing_fields(self, event: bytes) -> bytes:
        at = event.find(_DATA)
        if at < 0 or self._passes:
            return event
        if self._number == 0 and NUMBER.search(event) is not None:
            self._passes = True
            return event
        begin = at + len(_DATA)
        head, data = event[:begin], event[begin:]
        fields = b'"sequence_number":%d,' % self._number
        self._number += 1
        if (item := _text_after(data, _ITEM)) is not None:
            fields += b'"output_index":%d,"content_index":0,' % self._items.get(item, 0)
            if data.startswith(_TEXT):
                fields += b'"logprobs":[],'
        elif b'"item":{' in data and (item := _text_after(data, _ID)) is not None:
            fields += b'"output_index":%d,' % self._items.setdefault(item, len(self._items))
        elif _BEGINS in data and b'"output":' not in data:
            data = data.replace(_BEGINS, _BEGINS + msgspec.json.encode(self._start_fields)[1:-1] + b",", 1)
        return head + fields + data


def _text_after(data: bytes, key: bytes) -> bytes | None:
    """The plain text that follows `key`."""
    at = data.find(key)
    if at < 0:
        return None
    begin = at + len(key)
    return data[begin : data.find(b'"', begin)]
