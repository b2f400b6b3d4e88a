"""What a worker's whole answer says of its cache of prompts, as headers of the response.

The head can only tell it once the body is there, so the answer is held for it: only where the request says something about
caches, and only an answer whose length is known and small. Nothing is held of a stream, whose head says nothing of it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from supervisor.io.upstream import Headers, UpstreamResponse

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


def report(body: bytes) -> Headers:
    """What a whole answer says, as OpenAI, Anthropic and llama.cpp write it; nothing of what it doesn't say."""
    try:
        found = _answer(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
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


class HeldResponse:
    """A response that was read to its end; see `io.upstream.UpstreamResponse`."""

    def __init__(self, response: UpstreamResponse, body: bytes) -> None:
        self.status = response.status
        self.headers: Headers = response.headers
        self.drained = False
        self._response = response
        self._body = body

    async def next_chunk(self) -> bytes:
        """The body, then nothing."""
        body, self._body, self.drained = self._body, b"", True
        return body

    async def read(self, limit: int) -> bytes:
        """The body."""
        return await self.next_chunk()

    def close(self) -> None:
        """Let go of the worker's response."""
        self._response.close()


async def held(response: UpstreamResponse) -> tuple[UpstreamResponse, Headers]:
    """The response, and what it says. Raises as `UpstreamResponse.next_chunk` if it has to be read and breaks off."""
    fields = dict(response.headers)
    length = fields.get(b"content-length", b"")
    is_whole = fields.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in fields
    if not (is_whole and length.isdigit() and int(length) <= HELD_LIMIT):
        return response, []
    body = await response.read(HELD_LIMIT)
    return HeldResponse(response, body), report(body)
