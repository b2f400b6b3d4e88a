"""OpenAI's Responses: `…/responses`, whose streams are events with types, numbers and places.

llama.cpp leaves the numbers and places out, and `output` of a response that begins. OpenAI's own SDKs don't get through
such a stream, so both are put in where they are missing: the events are not parsed, the fields are spliced in.
"""

from __future__ import annotations

import re
import time
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.llm_pool import LLM_POOL, is_llm_pool
from supervisor.dialects.openai import OpenAI
from supervisor.proxy.dialect import after
from supervisor.proxy.translation import StreamTranslation, TargetedTranslation, Translation

EVENT_LIMIT: Final = 4 * 1024 * 1024  # a stream with a longer one passes as it is
_PATHS: Final = frozenset({"/v1/responses", "/responses"})
_NUMBER: Final = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})\b')
_ITEM: Final = b'"item_id":"'
_ID: Final = b'"id":"'
_BEGINS: Final = b'"response":{'
_FRAME: Final = b"\n\n"
_DATA: Final = b"data: {"
_TEXT: Final = b'"type":"response.output_text.'


class Responses(OpenAI):
    """As OpenAI's other paths, but for the events of its streams."""

    name = "responses"

    def owns(self, path: str) -> bool:
        """The path of a response, whatever is before it."""
        return path.endswith("/responses")

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """See Dialect."""
        error = msgspec.json.decode(body)["error"]
        numbers = _NUMBER.findall(sent)
        event = {
            "type": "error",
            "code": error.get("code"),
            "message": error.get("message"),
            "param": error.get("param"),
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return after(sent, b"event: error\ndata: " + msgspec.json.encode(event) + _FRAME)

    def translation(self, method: str, path: str) -> Translation | None:
        """See Dialect."""
        return LLM_POOL if method == "POST" and path in _PATHS else None

    def required_translation(self, method: str, path: str, fields: Fields) -> TargetedTranslation | None:
        """See Dialect."""
        return LLM_POOL if method == "POST" and path in _PATHS and is_llm_pool(fields) else None

    def completion(self, model: str, *, stream: bool) -> StreamTranslation | None:
        """See Dialect."""
        return Completion(model) if stream else None


class Completion:
    """A stream whose events get what they lack, if the first one lacks its number."""

    def __init__(self, model: str) -> None:
        self._begun = {"created_at": int(time.time()), "model": model, "output": []}
        self._rest = b""
        self._number = 0
        self._items: dict[bytes, int] = {}  # id → its place in the output
        self._passes = False

    def feed(self, piece: bytes) -> bytes:
        """The complete events so far."""
        if b"\r\n" in piece:  # not llama.cpp's; with other ends of lines no event would be seen to end
            self._passes = True
        if self._passes:
            return self.end() + piece
        *events, self._rest = (self._rest + piece).split(_FRAME)
        whole = b"".join([self._completed(event) + _FRAME for event in events])
        if self._passes or len(self._rest) > EVENT_LIMIT:
            self._passes = True
            return whole + self.end()
        return whole

    def end(self) -> bytes:
        """What follows the last event."""
        rest, self._rest = self._rest, b""
        return rest

    def _completed(self, event: bytes) -> bytes:
        at = event.find(_DATA)
        if at < 0 or self._passes:
            return event
        if self._number == 0 and _NUMBER.search(event) is not None:
            self._passes = True
            return event
        begin = at + len(_DATA)
        head, data = event[:begin], event[begin:]
        fields = b'"sequence_number":%d,' % self._number
        self._number += 1
        if (item := _text(data, _ITEM)) is not None:
            fields += b'"output_index":%d,"content_index":0,' % self._items.get(item, 0)
            if data.startswith(_TEXT):
                fields += b'"logprobs":[],'
        elif b'"item":{' in data and (item := _text(data, _ID)) is not None:
            fields += b'"output_index":%d,' % self._items.setdefault(item, len(self._items))
        elif _BEGINS in data and b'"output":' not in data:
            data = data.replace(_BEGINS, _BEGINS + msgspec.json.encode(self._begun)[1:-1] + b",", 1)
        return head + fields + data


def _text(data: bytes, key: bytes) -> bytes | None:
    """The plain text that follows `key`."""
    at = data.find(key)
    if at < 0:
        return None
    begin = at + len(key)
    return data[begin : data.find(b'"', begin)]


RESPONSES: Final = Responses()
