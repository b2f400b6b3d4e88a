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
"""Content types whose clients take an answer piece by piece, so that an error can be the last one."""

_OF_THE_BODY: Final = frozenset((b"content-length", b"etag"))

TAIL_BYTES: Final = 4096
"""How many bytes are kept of each of a stream's last pieces: see `Outcome`."""
TAIL_PIECES: Final = 16  # enough for the finish, comments, the usage and `[DONE]`
JOINED_BYTES: Final = 512  # of small pieces, which count as one: however reads split them


def remember(tail: deque[bytes], piece: bytes) -> None:
    """Keep the end of a piece, as one of `TAIL_PIECES`."""
    if tail and len(piece) + len(tail[-1]) <= JOINED_BYTES:
        tail[-1] += piece
    else:
        tail.append(piece if len(piece) <= TAIL_BYTES else piece[-TAIL_BYTES:])


class Use(enum.Enum):
    """How a filter uses an answer."""

    NONE = enum.auto()
    PIECES = enum.auto()  # changes it piece by piece
    WHOLE_IF_SMALL = enum.auto()  # has to have all of it; one that has no room in memory passes as it is
    WHOLE = enum.auto()  # has to have all of it; one that has no room in memory is an error


class Head:
    """Status and headers of an answer. Filters may change the headers."""

    __slots__ = ("content_type", "headers", "status")

    def __init__(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.content_type = self.get(b"content-type")

    def get(self, name: bytes) -> bytes:
        """The first field of this name; empty if there is none."""
        for found, value in self.headers:
            if found == name:
                return value
        return b""

    @property
    def is_encoded(self) -> bool:
        """Is the body compressed, so that nobody can read it on its way?"""
        return self.get(b"content-encoding") not in (b"", b"identity")

    def changes_body(self, content_type: bytes | None = None) -> None:
        """Drop the headers that describe the worker's body; set another content type."""
        dropped = _OF_THE_BODY if content_type is None else _OF_THE_BODY | {b"content-type"}
        self.headers = [item for item in self.headers if item[0] not in dropped]
        if content_type is not None:
            self.headers.append((b"content-type", content_type))
            self.content_type = content_type


class Filter:
    """One filter for one answer. This class passes everything on."""

    translates = False
    """Do its answers report tokens in another place than the worker's?"""
    sees_errors = False
    """Does it get the head and pieces of error answers that pass unchanged? Other filters get a model's answers alone."""
    settles = False
    """Must `settle` be awaited?"""

    @property
    def gathered(self) -> int:
        """About how many bytes of the answer the filter keeps in memory."""
        return 0

    def head(self, head: Head) -> Use:
        """Look at the head, and change it if need be."""
        return Use.NONE

    def feed(self, piece: bytes) -> bytes:
        """The output for the next piece, possibly empty. A piece is not empty, and may end anywhere. Raises LlmuxError."""
        return piece

    def end(self) -> bytes:
        """The last output. Raises LlmuxError."""
        return b""

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """The output for a body that has come as a whole. Raises LlmuxError."""
        return (self.feed(bytes(body)) if body else b"") + self.end()

    async def settle(self) -> None:
        """Finish what its last output needs before that goes to the client."""

    def error(self, head: Head, body: bytes) -> bytes:
        """The error that the client gets: a whole answer, or the last event of a stream. `head` may not have been called before."""
        return body


async def filtered(
    response: UpstreamResponse, filters: Iterable[Filter], gathered: Gathered, judge: StreamJudge | None = None
) -> UpstreamResponse:
    """The response as these filters change it; the response itself where none uses it.

    `gathered` counts the bytes that the filters keep. `judge` comes before all of them: it judges the worker's own events. A body that
    a filter needs as a whole is filtered here, before anything is sent. Raises LlmuxError.
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
        """The end of what the worker sent."""
        self._judge = judge
        self._response = response
        self._head = head
        self._uses = uses
        self._filters = [*uses]
        self._gathered = gathered
        self._begun = b""  # what of a body came before it had no room
        self._error: LlmuxError | None = None  # of the end, once what came before it is sent
        self._whole: Bytes | None = None
        self._at = 0  # in it

    async def take_whole(self) -> None:
        """Filter the body as a whole, where it has room. Call it before any other method. Raises LlmuxError."""
        body: Bytes = await self._response.next_chunk()
        while True:
            try:
                self._gathered.grow(len(body))
            except LlmuxError:
                if Use.WHOLE in self._uses.values():
                    raise
                self._filters = [each for each, use in self._uses.items() if use is Use.PIECES]
                self._begun = bytes(body)
                return
            if self._response.drained or not (piece := await self._response.next_chunk()):
                break
            if isinstance(body, bytes):
                body = bytearray(body)  # grows in place: joined at the end, all would be copied in one turn of the loop
            body += piece
        if len(body) > SLICE:
            await asyncio.sleep(0)  # other tasks run
        remember(self.worker_tail, bytes(body[-TAIL_BYTES:]))
        for each in self._filters:
            body = await each.whole(body, self._head)
        self._whole, self.headers = body, self._head.headers

    async def next_chunk(self) -> bytes:
        """The next piece that is not empty, or the last piece."""
        if self._whole is not None:
            if self._at:
                await asyncio.sleep(0)
            piece, self._at = bytes(self._whole[self._at : self._at + SLICE]), self._at + SLICE
            self.drained = self._at >= len(self._whole)
            return piece
        found = b""
        while not found and not self.drained:
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = None  # it has this frame, which has this
            if self._begun or not self._response.drained:
                piece, self._begun = self._begun or await self._response.next_chunk(), b""
                if self._judge is not None:
                    piece, self._error = self._judge.passed(piece, self._response.drained, self._tail)
                remember(self.worker_tail, piece)
                found = self._fed(piece)
                self._gathered.grow(sum([each.gathered for each in self._filters]))
            if self._response.drained and self._error is None:
                found = self._ended(found)
            for each in self._filters:
                if each.settles:
                    await each.settle()
        return found

    def _tail(self) -> bytes:
        return b"".join(self.worker_tail)

    def _fed(self, piece: bytes) -> bytes:
        for each in self._filters:
            if not piece:
                break
            piece = each.feed(piece)
        return piece

    def _ended(self, found: bytes) -> bytes:
        """The last output. If the end fails, the client first gets the output `found` before it."""
        last = b""
        try:
            for each in self._filters:
                last = (each.feed(last) if last else b"") + each.end()
        except LlmuxError as error:
            if not found:
                raise
            self._error = error.with_traceback(None)  # whose frames have this
            return found
        self.drained = True
        return found + last

    async def read(self, limit: int) -> bytes:
        """The body as the worker sent it."""
        return await self._response.read(limit)

    def close(self) -> None:
        """Release the worker's response."""
        self._response.close()
