"""Filters change a worker's answer on its way to the client. Each gets what the one before it made.

The order is the gateway's: cache report, pictures, rename, repair, translate, the response that is kept, the copy that is kept. The
last two get errors, too, as the client does; nobody else: they are rendered in the client's dialect.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from supervisor.errors import LlmuxError
from supervisor.io.held_body import SLICE, Gathered
from supervisor.io.upstream import Headers, UpstreamResponse

EVENTS: Final = b"text/event-stream"
LINES: Final = (b"application/x-ndjson", b"application/ndjson", b"application/jsonl", b"application/x-jsonlines")
STREAMS: Final = (EVENTS, *LINES)
"""Content types whose clients take an answer piece by piece, so that an error can be the last one."""

_KEPT_PIECES: Final = 4  # of the end of what the worker sent, where its usage stands
_KEPT_BYTES: Final = 4096
_OF_THE_BODY: Final = frozenset((b"content-length", b"etag"))


class Use(enum.Enum):
    """What a filter does with an answer."""

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
        """Drop what tells of the worker's body; set another content type."""
        dropped = _OF_THE_BODY if content_type is None else _OF_THE_BODY | {b"content-type"}
        self.headers = [item for item in self.headers if item[0] not in dropped]
        if content_type is not None:
            self.headers.append((b"content-type", content_type))
            self.content_type = content_type


class Filter:
    """One for each answer. By itself it passes everything on."""

    translates = False
    """Do tokens stand elsewhere in its answers than in the worker's?"""
    sees_errors = False
    """Does it get error answers, too? The others are for what a model says."""
    settles = False
    """Has it something to wait for? See `settle`."""

    @property
    def gathered(self) -> int:
        """About how many bytes of memory it keeps of what came."""
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

    async def whole(self, body: bytes, head: Head) -> bytes:
        """The output for a body that has come as a whole. Raises LlmuxError."""
        return (self.feed(body) if body else b"") + self.end()

    async def settle(self) -> None:
        """Finish what its last output needs before that goes to the client."""

    def error(self, head: Head, body: bytes) -> bytes:
        """The error that the client gets: a whole answer, or the last event of a stream. It may have got no head before."""
        return body


async def filtered(response: UpstreamResponse, filters: Iterable[Filter], gathered: Gathered) -> UpstreamResponse:
    """The response as these filters change it: itself where none has anything to do with it.

    `gathered` counts what they keep. A whole body is filtered here, before anything is sent. Raises LlmuxError.
    """
    head = Head(response.status, response.headers)
    seeing = (each for each in filters if response.status < 400 or each.sees_errors)
    uses = {each: use for each in seeing if (use := each.head(head)) is not Use.NONE}
    if not uses and head.headers is response.headers:
        return response
    found = FilteredResponse(response, head, uses, gathered)
    if not {Use.WHOLE, Use.WHOLE_IF_SMALL}.isdisjoint(uses.values()):
        await found.take_whole()
    return found


class FilteredResponse:
    """See `io.upstream.UpstreamResponse`."""

    def __init__(self, response: UpstreamResponse, head: Head, uses: Mapping[Filter, Use], gathered: Gathered) -> None:
        self.status = head.status
        self.headers = head.headers
        self.drained = False
        self.is_translated = any(each.translates for each in uses)
        self.worker_tail: deque[bytes] = deque(maxlen=_KEPT_PIECES)
        """The end of what the worker sent."""
        self._response = response
        self._head = head
        self._uses = uses
        self._filters = [*uses]
        self._gathered = gathered
        self._begun = b""  # what of a body came before it had no room
        self._error: LlmuxError | None = None  # of the end, once what came before it is sent
        self._whole: bytes | None = None
        self._at = 0  # in it

    async def take_whole(self) -> None:
        """Filter the body as a whole, where it has room. Call it before any other method. Raises LlmuxError."""
        parts: list[bytes] = []
        size = 0
        while not self._response.drained and (piece := await self._response.next_chunk()):
            parts.append(piece)
            size += len(piece)
            try:
                self._gathered.grow(size)
            except LlmuxError:
                if Use.WHOLE in self._uses.values():
                    raise
                self._filters = [each for each, use in self._uses.items() if use is Use.PIECES]
                self._begun = b"".join(parts)
                return
        body = b"".join(parts)
        if size > SLICE:
            await asyncio.sleep(0)  # other tasks run
        self.worker_tail.append(body[-_KEPT_BYTES:])
        for each in self._filters:
            body = await each.whole(body, self._head)
        self._whole, self.headers = body, self._head.headers

    async def next_chunk(self) -> bytes:
        """The next piece that is not empty, or the last one."""
        if self._whole is not None:
            if self._at:
                await asyncio.sleep(0)
            piece, self._at = self._whole[self._at : self._at + SLICE], self._at + SLICE
            self.drained = self._at >= len(self._whole)
            return piece
        if self._error is not None:
            raise self._error
        found = b""
        while not found and not self.drained:
            if self._begun or not self._response.drained:
                piece, self._begun = self._begun or await self._response.next_chunk(), b""
                self.worker_tail.append(piece[-_KEPT_BYTES:])
                found = self._fed(piece)
                self._gathered.grow(sum([each.gathered for each in self._filters]))
            if self._response.drained:
                found = self._ended(found)
            for each in self._filters:
                if each.settles:
                    await each.settle()
        return found

    def _fed(self, piece: bytes) -> bytes:
        for each in self._filters:
            if not piece:
                break
            piece = each.feed(piece)
        return piece

    def _ended(self, found: bytes) -> bytes:
        """What comes last. Where the end fails, what was `found` before it goes to the client first."""
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
        """As the worker sent it."""
        return await self._response.read(limit)

    def close(self) -> None:
        """Let go of the worker's response."""
        self._response.close()
