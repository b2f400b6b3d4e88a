"""Response headers that report the use of the worker's prompt cache, from the figures in the worker's whole answer.

The head is sent before the body, so the answer is buffered until it is complete: only for a request with a cache directive, and
only if the answer's length is known and small. Streams are not buffered, and their heads report nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.filters.filters import Filter, Head, Use
from supervisor.host.store.request_buffer import Bytes
from supervisor.host.upstream.upstream import Headers

HIT: Final = b"x-cache-hit"
REUSED: Final = b"x-cache-tokens-reused"
GPU_MS: Final = b"x-gpu-time-ms"
NOTHING_REUSED: Final[Headers] = [(HIT, b"false"), (REUSED, b"0")]
NO_CACHE_REPORT: Final[Headers] = [*NOTHING_REUSED, (GPU_MS, b"0")]
"""Defaults, for clients that expect all three headers in every answer."""
BUFFER_LIMIT: Final = 1024 * 1024


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
    """The headers for the figures in a whole answer of OpenAI's, Anthropic's or llama.cpp's API; none for missing figures."""
    try:
        found = _answer(body)
    except UNREADABLE:
        return []
    headers: Headers = []
    usage, timings = found.usage or _Usage(), found.timings or _Timings()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    counts = (details.cached_tokens, usage.cache_read_input_tokens, timings.cache_n)
    reused = next((count for count in counts if count is not None), None)
    if reused is not None and reused >= 0:
        headers += [(HIT, b"true" if reused else b"false"), (REUSED, b"%d" % reused)]
    if timings.prompt_ms is not None and timings.predicted_ms is not None:  # llama.cpp's time of the request's slot
        headers.append((GPU_MS, b"%d" % max(0.0, timings.prompt_ms + timings.predicted_ms)))
    return headers


class CacheReport(Filter):
    """Adds the headers of `report` to an answer."""

    def __init__(self, otherwise: Headers, present: Collection[bytes]) -> None:
        """`otherwise`: headers for an answer without figures. `present`: names of headers that the answer has already."""
        self._otherwise = otherwise
        self._present = present

    def head(self, head: Head) -> Use:
        """See Filter."""
        self._present = {*self._present, *(name for name, _ in head.headers)}
        head.headers = [*head.headers, *(item for item in self._otherwise if item[0] not in self._present)]
        length = head.get(b"content-length")
        is_whole = head.content_type.startswith(b"application/json") and not head.get(b"content-encoding")
        return Use.WHOLE_IF_SMALL if is_whole and length.isdigit() and int(length) <= BUFFER_LIMIT else Use.NONE

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """See Filter."""
        reported = [item for item in report(body) if item[0] not in self._present]
        names = {name for name, _ in reported}
        head.headers = [*(item for item in head.headers if item[0] not in names), *reported]
        return body
