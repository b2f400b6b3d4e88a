"""Filters change a worker's answer on its way to the client. Each gets the output of the one before it.

`gateway.send` sets their order. Errors are rendered in the client's dialect, and pass the filters by `error` alone.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from supervisor.errors import LlmuxError
from supervisor.host.store.request_buffer import SLICE, Bytes, Gathered
from supervisor.host.upstream.upstream import Headers, UpstreamResponse

if TYPE_CHECKING:
    from supervisor.gateway.filters.stream_end import StreamJudge

EVENTS: Final = b"text/event-stream"
LINES: Final = (b"application/x-ndjson", b"application/ndjson", b"application/jsonl", b"application/x-jsonlines")
STREAMS: Final = (EVENTS, *LINES)
"""Content types whose clients read an answer piece by piece, so that an error can be the last piece."""

_BODY_HEADERS: Final = frozenset((b"content-length", b"etag"))

TAIL_BYTES: Final = 4096
"""Most bytes kept of each of a stream's last pieces: see `Outcome`."""
TAIL_PIECES: Final = 16  # enough for the finish, comments, the usage and `[DONE]`
JOINED_BYTES: Final = 512  # small pieces are joined up to this size, because reads may split a stream anywhere


def remember(tail: deque[bytes], piece: bytes) -> None:
    """Append the end of a piece to the tail."""
    if tail and len(piece) + len(tail[-1]) <= JOINED_BYTES:
        tail[-1] += piece
    else:
        tail.append(piece if len(piece) <= TAIL_BYTES else piece[-TAIL_BYTES:])


class Use(enum.Enum):
    """How a filter uses an answer."""

    NONE = enum.auto()
    PIECES = enum.auto()  # processes the answer piece by piece
    WHOLE_IF_SMALL = enum.auto()  # needs the whole answer; an answer without room in memory passes unchanged
    WHOLE = enum.auto()  # needs the whole answer; an answer without room in memory is an error


class Head:
    """Status and headers of an answer. Filters may change the headers."""

    __slots__ = ("content_type", "headers", "status")

    def __init__(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.content_type = self.get(b"content-type")

    def get(self, name: bytes) -> bytes:
        """The first header of this name; empty if there is none."""
        for found, value in self.headers:
            if found == name:
                return value
        return b""

    @property
    def is_encoded(self) -> bool:
        """Is the body compressed, so that filters can't read it?"""
        return self.get(b"content-encoding") not in (b"", b"identity")

    def changes_body(self, content_type: bytes | None = None) -> None:
        """Drop the headers that describe the worker's body; set another content type."""
        dropped = _BODY_HEADERS if content_type is None else _BODY_HEADERS | {b"content-type"}
        self.headers = [item for item in self.headers if item[0] not in dropped]
        if content_type is not None:
            self.headers.append((b"content-type", content_type))
            self.content_type = content_type


class Filter:
    """One filter for one answer. This class passes everything on."""

    translates = False
    """Do its answers report tokens in another place than the worker's?"""
    sees_errors = False
    """Does the filter also get the head and pieces of error answers that pass unchanged?"""
    settles = False
    """Must `settle` be awaited?"""

    @property
    def gathered(self) -> int:
        """The approximate number of the answer's bytes that the filter keeps in memory."""
        return 0

    def head(self, head: Head) -> Use:
        """Read the head, and change it if need be."""
        return Use.NONE

    def feed(self, piece: bytes) -> bytes:
        """The output for the next piece, possibly empty. A piece is not empty, and may end anywhere. Raises LlmuxError."""
        return piece

    def end(self) -> bytes:
        """The last output. Raises LlmuxError."""
        return b""

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """The output for a whole body. Raises LlmuxError."""
        return (self.feed(bytes(body)) if body else b"") + self.end()

    async def settle(self) -> None:
        """Complete asynchronous work, such as storing the answer, before the last output goes to the client."""

    def error(self, head: Head, body: bytes) -> bytes:
        """The client's error: a whole answer, or the last event of a stream. `head` may not have been called before."""
        return body


async def filtered(
    response: UpstreamResponse, filters: Iterable[Filter], gathered: Gathered, judge: StreamJudge | None = None
) -> UpstreamResponse:
    """The response changed by these filters; the response itself if no filter uses it.

    `gathered` counts the bytes that the filters keep. `judge` comes before all filters: it judges the worker's own events. A body
    that a filter needs as a whole is filtered here, before anything is sent. Raises LlmuxError.
    """
    head = Head(response.status, response.headers)
    seeing = (each for each in filters if response.status < 400 or each.sees_errors)
    uses = {each: use for each in seeing if (use := each.head(head)) is not Use.NONE}
    if not uses and head.headers is response.headers:
        return response
    found = FilteredResponse(response, head, uses, gathered, judge)
    if not {Use.WHOLE, Use.WHOLE_IF_SMALL}.isdisjoint(uses.values()):
        await found.take_whole()
    return found


class FilteredResponse:
    """See `host.upstream.upstream.UpstreamResponse`."""

    def __init__(
        self,
        response: UpstreamResponse,
        head: Head,
        uses: Mapping[Filter, Use],
        gathered: Gathered,
        judge: StreamJudge | None = None,
    ) -> None:
        self.status = head.status
        self.headers = head.headers
        self.drained = False
        self.is_translated = any(each.translates for each in uses)
        self.worker_tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        """The end of the worker's body."""
        self._judge = judge
        self._response = response
        self._head = head
        self._uses = uses
        self._filters = [*uses]
        self._gathered = gathered
        self._first_bytes = b""  # of a body that has no room in memory
        self._error: LlmuxError | None = None  # raised once the output before it is sent
        self._whole_body: Bytes | None = None
        self._sent = 0  # bytes of `_whole_body`

    async def take_whole(self) -> None:
        """Filter the body as a whole, if it has room in memory. Call this before any other method. Raises LlmuxError."""
        body: Bytes = await self._response.next_chunk()
        while True:
            try:
                self._gathered.grow(len(body))
            except LlmuxError:
                if Use.WHOLE in self._uses.values():
                    raise
                self._filters = [each for each, use in self._uses.items() if use is Use.PIECES]
                self._first_bytes = bytes(body)
                return
            if self._response.drained or not (piece := await self._response.next_chunk()):
                break
            if isinstance(body, bytes):
                body = bytearray(
                    body
                )  # grows in place: joining at the end would copy everything in one turn of the loop
            body += piece
        if len(body) > SLICE:
            await asyncio.sleep(0)  # other tasks run
        remember(self.worker_tail, bytes(body[-TAIL_BYTES:]))
        for each in self._filters:
            body = await each.whole(body, self._head)
        self._whole_body, self.headers = body, self._head.headers

    async def next_chunk(self) -> bytes:
        """The next non-empty piece, or the last piece."""
        if self._whole_body is not None:
            if self._sent:
                await asyncio.sleep(0)
            piece, self._sent = bytes(self._whole_body[self._sent : self._sent + SLICE]), self._sent + SLICE
            self.drained = self._sent >= len(self._whole_body)
            return piece
        found = b""
        while not found and not self.drained:
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = None  # breaks a reference cycle: its traceback refers to this frame
            if self._first_bytes or not self._response.drained:
                piece, self._first_bytes = self._first_bytes or await self._response.next_chunk(), b""
                if self._judge is not None:
                    piece, self._error = self._judge.passed(piece, self._response.drained, self._worker_tail_bytes)
                remember(self.worker_tail, piece)
                found = self._feed_filters(piece)
                self._gathered.grow(sum([each.gathered for each in self._filters]))
            if self._response.drained and self._error is None:
                found = self._end_filters(found)
            for each in self._filters:
                if each.settles:
                    await each.settle()
        return found

    def _worker_tail_bytes(self) -> bytes:
        return b"".join(self.worker_tail)

    def _feed_filters(self, piece: bytes) -> bytes:
        for each in self._filters:
            if not piece:
                break
            piece = each.feed(piece)
        return piece

    def _end_filters(self, found: bytes) -> bytes:
        """The last output, after the output `found`. If the end fails, the client gets `found` before the error."""
        last = b""
        try:
            for each in self._filters:
                last = (each.feed(last) if last else b"") + each.end()
        except LlmuxError as error:
            if not found:
                raise
            self._error = error.with_traceback(None)  # its frames refer to this object
            return found
        self.drained = True
        return found + last

    async def read(self, limit: int) -> bytes:
        """The body as the worker sent it."""
        return await self._response.read(limit)

    def close(self) -> None:
        """Release the worker's response."""
        self._response.close()
