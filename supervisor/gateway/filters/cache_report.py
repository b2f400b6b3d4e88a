"""What a worker's whole answer says of its cache of prompts, as headers of the response.

The head can only tell it once the body is there, so the answer is held for it: only where the request says something about
caches, and only an answer whose length is known and small. Nothing is held of a stream, whose head says nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.filters.filters import Filter, Head, Use
from supervisor.io.request_buffer import Bytes
from supervisor.io.upstream import Headers

HIT: Final = b"x-cache-hit"
REUSED: Final = b"x-cache-tokens-reused"
GPU_MS: Final = b"x-gpu-time-ms"
NOTHING_REUSED: Final[Headers] = [(HIT, b"false"), (REUSED, b"0")]
NOTHING_TOLD: Final[Headers] = [*NOTHING_REUSED, (GPU_MS, b"0")]
"""For clients that look for all three in every answer."""
HELD_LIMIT: Final = 1024 * 1024


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    timings: _Timings | None = None


_answer: Final = msgspec.json.Decoder(_Answer).decode


def report(body: Bytes) -> Headers:
    """What a whole answer says, as OpenAI, Anthropic and llama.cpp write it; nothing of what it doesn't say."""
    try:
        found = _answer(body)
    except UNREADABLE:
        return []
    headers: Headers = []
    usage, timings = found.usage or _Usage(), found.timings or _Timings()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    told = (details.cached_tokens, usage.cache_read_input_tokens, timings.cache_n)
    reused = next((count for count in told if count is not None), None)
    if reused is not None and reused >= 0:
        headers += [(HIT, b"true" if reused else b"false"), (REUSED, b"%d" % reused)]
    if timings.prompt_ms is not None and timings.predicted_ms is not None:  # of the slot that worked on it
        headers.append((GPU_MS, b"%d" % max(0.0, timings.prompt_ms + timings.predicted_ms)))
    return headers


class CacheReport(Filter):
    """Tells in an answer's headers what it says of its cache."""

    def __init__(self, otherwise: Headers, said: Collection[bytes]) -> None:
        """`otherwise`: the headers of an answer that says nothing. `said`: names of headers that the client gets anyway."""
        self._otherwise = otherwise
        self._said = said

    def head(self, head: Head) -> Use:
        """See Filter."""
        self._said = {*self._said, *(name for name, _ in head.headers)}
        head.headers = [*head.headers, *(item for item in self._otherwise if item[0] not in self._said)]
        length = head.get(b"content-length")
        is_whole = head.content_type.startswith(b"application/json") and not head.get(b"content-encoding")
        return Use.WHOLE_IF_SMALL if is_whole and length.isdigit() and int(length) <= HELD_LIMIT else Use.NONE

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """See Filter."""
        told = [item for item in report(body) if item[0] not in self._said]
        names = {name for name, _ in told}
        head.headers = [*(item for item in head.headers if item[0] not in names), *told]
        return body
