"""A path that no worker serves: its requests become canonical, and canonical responses become its own.

Canonical is OpenAI's API. A dialect gives a `Translation` for each such path; for every other path it gives none, and the
bytes stay untouched. Errors are not translated here: the dialect renders them, see `Dialect.error`.
"""

from __future__ import annotations

from typing import Final, Protocol

from supervisor.catalog.rewrite import Fields
from supervisor.errors import UpstreamError
from supervisor.io.upstream import Headers, UpstreamResponse

ANSWER_LIMIT: Final = 64 * 1024 * 1024
_REPLACED: Final = (b"content-type", b"content-length", b"etag")


class StreamTranslation(Protocol):
    """One stream: pieces of the canonical one in, pieces of the dialect's out."""

    def feed(self, piece: bytes) -> bytes:
        """The output for the next piece, possibly empty. A piece may end anywhere."""

    def end(self) -> bytes:
        """The last output, after a stream that ended properly."""


class Translation(Protocol):
    """How one path of a dialect is mapped. Stateless."""

    @property
    def path(self) -> str:
        """The canonical path."""

    @property
    def content_type(self) -> bytes:
        """Of a whole answer."""

    @property
    def stream_content_type(self) -> bytes:
        """Of a stream."""

    def request(self, fields: Fields) -> Fields:
        """The canonical request's top-level fields. Raises InvalidRequestError."""

    def answer(self, body: bytes) -> bytes:
        """The dialect's answer, by a whole canonical one."""

    def stream(self) -> StreamTranslation:
        """For a stream that begins now."""


class TranslatedResponse:
    """A worker's response as a client of the dialect gets it; see `io.upstream.UpstreamResponse`."""

    def __init__(self, response: UpstreamResponse, translation: Translation) -> None:
        self._response = response
        self._translation = translation
        kind = next((value for name, value in response.headers if name == b"content-type"), b"")
        self._stream = translation.stream() if kind.startswith(b"text/event-stream") else None
        content_type = translation.content_type if self._stream is None else translation.stream_content_type
        self.status = response.status
        self.headers: Headers = [item for item in response.headers if item[0] not in _REPLACED]
        self.headers.append((b"content-type", content_type))
        self.drained = False

    async def next_chunk(self) -> bytes:
        """The next piece that is not empty, or the last one."""
        if self._stream is None:
            body = await self.read(ANSWER_LIMIT)
            self.drained = True
            return self._translation.answer(body)
        found = b""
        while not found and not self.drained:
            found = self._stream.feed(await self._response.next_chunk())
            if self._response.drained:
                self.drained = True
                found += self._stream.end()
        return found

    async def read(self, limit: int) -> bytes:
        """The whole body as the worker sent it. Raises UpstreamError for one that is larger."""
        body = await self._response.read(limit)
        if len(body) >= limit:
            raise UpstreamError("The worker's answer is too large to be translated.")
        return body

    def close(self) -> None:
        """Release the worker's response."""
        self._response.close()
