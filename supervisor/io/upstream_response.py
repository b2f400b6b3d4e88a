"""Responses whose bodies are read while they arrive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from supervisor.errors import UpstreamError

if TYPE_CHECKING:
    from supervisor.io.upstream_wire import Connection

Headers = list[tuple[bytes, bytes]]

PAUSE_ABOVE: Final = 128 * 1024


class UpstreamResponse(Protocol):
    """A response whose body may still be arriving: a worker's (`WorkerResponse`) or a remote's.

    `headers` are lowercase, in order, duplicates kept, without hop-by-hop fields.
    """

    __slots__ = ()

    status: int
    headers: Headers

    @property
    def drained(self) -> bool:
        """The whole body was read."""
        ...

    async def next_chunk(self) -> bytes:
        """All that arrived since the last call, at least one byte; b"" after the end. Cancelling it is safe.

        Raises UpstreamError when the other side broke off early, UpstreamTimeoutError when it fell silent.
        """
        ...

    async def read(self, limit: int) -> bytes:
        """The body up to its end, or until it exceeds `limit` bytes."""
        parts: list[bytes] = []
        size = 0
        while size <= limit and (chunk := await self.next_chunk()):
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts)

    def close(self) -> None:
        """Call it when done with the response. Unless the body is complete, this closes the connection at once."""
        ...


class WorkerResponse(UpstreamResponse):
    """A worker's response. One consumer."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_connection",
        "_error",
        "_waiter",
        "complete",
        "head_done",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.head_done = False
        self.complete = False
        self._connection: Connection | None = connection
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError or UpstreamTimeoutError."""
        while not self.head_done:
            if self._error is not None:
                raise self._failure()
            await self._wait()

    async def next_chunk(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._failure()
            if self.complete:
                return b""
            await self._wait()
        chunks = self._chunks
        self._chunks = []
        if self._buffered > PAUSE_ABOVE and self._connection is not None:
            self._connection.resume()
        self._buffered = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def drained(self) -> bool:
        return self.complete and not self._chunks

    def close(self) -> None:
        connection = self._connection
        if connection is not None:
            self.fail(UpstreamError("The response was closed."))
            connection.abort()

    # called by the connection

    @property
    def waiting(self) -> bool:
        """The consumer waits for the worker, not the worker for the consumer."""
        return self._waiter is not None and not self._waiter.done()

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.head_done = True

    def add(self, data: bytes) -> bool:
        """Keep a piece of the body. True: enough is buffered, stop reading."""
        self._chunks.append(data)
        self._buffered += len(data)
        return self._buffered > PAUSE_ABOVE

    def finish(self) -> None:
        self.complete = True
        self._connection = None
        self.wake()

    def fail(self, error: Exception) -> None:
        if self._error is None and not self.complete:
            self._error = error
        self._connection = None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _failure(self) -> Exception:
        """The error, once: kept here, it would keep the frames that it passes, and they the request's body."""
        assert self._error is not None
        try:
            return self._error
        finally:
            self._error = UpstreamError("The response has failed before.")

    def _wait(self) -> asyncio.Future[None]:
        """Until something comes. No coroutine: each piece of a stream would pass through one more."""
        assert not self.waiting, "one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
