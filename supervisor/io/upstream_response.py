"""A worker's response, as whoever asked for it reads it: fed by its connection, piece by piece."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from supervisor.errors import UpstreamError

if TYPE_CHECKING:
    from supervisor.io.upstream_wire import Connection

Headers = list[tuple[bytes, bytes]]

PAUSE_ABOVE: Final = 256 * 1024


class UpstreamResponse(Protocol):
    """A response whose body may still be arriving: a worker's (`WorkerResponse`) or a remote's."""

    status: int
    headers: Headers

    @property
    def drained(self) -> bool: ...

    async def next_chunk(self) -> bytes: ...

    async def read(self, limit: int) -> bytes: ...

    def close(self) -> None: ...


class WorkerResponse:
    """A response whose body may still be arriving. One consumer.

    `headers` are lowercase, in order, duplicates kept, without hop-by-hop fields. Cancelling a read is safe; call `close`
    when done with it, however it ended.
    """

    __slots__ = (
        "_buffered",
        "_chunks",
        "_connection",
        "_error",
        "_head_done",
        "_waiter",
        "complete",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self._connection: Connection | None = connection
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._head_done = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError or UpstreamTimeoutError."""
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def next_chunk(self) -> bytes:
        """All that arrived since the last call, at least one byte; b"" once the body was complete.

        Raises UpstreamError when the worker broke off before the end it had promised, UpstreamTimeoutError when it fell
        silent.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
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
        """The body is complete and nothing of it is left to read."""
        return self.complete and not self._chunks

    def __aiter__(self) -> WorkerResponse:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self.next_chunk()
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def read(self, limit: int) -> bytes:
        """The body up to its end or until more than `limit` bytes are there."""
        return await read_up_to(self, limit)

    def close(self) -> None:
        """Let go of it; unless the body is complete this closes the connection at once."""
        connection = self._connection
        if connection is not None:
            self.fail(UpstreamError("The response was closed."))
            connection.abort()

    # what the connection calls

    @property
    def waiting(self) -> bool:
        """A consumer waits for the worker (and not the other way round)."""
        return self._waiter is not None

    @property
    def head_done(self) -> bool:
        return self._head_done

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._head_done = True

    def add(self, data: bytes) -> bool:
        """Keep a piece of the body. True: enough is waiting, stop reading."""
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
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        assert self._waiter is None, "one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


async def read_up_to(body: UpstreamResponse, limit: int) -> bytes:
    """All of it, or until more than `limit` bytes are there."""
    parts: list[bytes] = []
    size = 0
    while size <= limit and (chunk := await body.next_chunk()):
        parts.append(chunk)
        size += len(chunk)
    return b"".join(parts)
