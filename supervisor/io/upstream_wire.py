"""One connection to a worker: an `asyncio.Protocol` that feeds an httptools parser, and the response that comes out of it.

What one read brings is handed on as one chunk. Reading is paused above 256 KiB, so a slow client slows its worker instead
of filling our memory. Whoever owns the connections (the pool) is told when one can be used again and when one is lost, and
asks each from time to time to `check` its deadlines: a request arms no timer of its own.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import AsyncIterator
from typing import Final, Protocol

import httptools

from supervisor.errors import UpstreamError, UpstreamTimeoutError

Headers = list[tuple[bytes, bytes]]
Body = bytes | bytearray | AsyncIterator[bytes]

PAUSE_ABOVE: Final = 256 * 1024
HEAD_LIMIT: Final = 64 * 1024
JOIN_BELOW: Final = 64 * 1024  # smaller bodies are written together with their head: one packet, one wake-up there

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout\s*=\s*(\d+)", re.IGNORECASE)


class Owner(Protocol):
    """What a connection needs of its pool."""

    loop: asyncio.AbstractEventLoop
    idle_s: float
    stream_idle_s: float
    last_byte_at: float

    def write_soon(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write it at the end of this turn of the loop."""

    def give_back(self, connection: Connection) -> None:
        """The answer was read to its end and the connection may be used again."""

    def forget(self, connection: Connection) -> None:
        """The connection is lost."""


class UpstreamResponse:
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

    def __aiter__(self) -> UpstreamResponse:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self.next_chunk()
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def read(self, limit: int) -> bytes:
        """The body up to its end or until more than `limit` bytes are there."""
        parts: list[bytes] = []
        size = 0
        while size <= limit and (chunk := await self.next_chunk()):
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts)

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


class Connection(asyncio.Protocol):
    """One connection to the worker; carries one exchange at a time."""

    def __init__(self, pool: Owner) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._exchange: UpstreamResponse | None = None
        self._pump: asyncio.Task[None] | None = None
        self._quiet_since = 0.0
        self._quiet_limit_s = 0.0
        self._headers: Headers = []
        self._reset()
        self.idle_s = pool.idle_s
        self.expires_at = 0.0
        self.lost = False

    def _reset(self) -> None:
        self._named: set[bytes] | None = None
        self._bodiless = False
        self._framed = False
        self._informational = False
        self._reusable = False
        self._message_done = False
        self._head_bytes = 0

    # life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a TCP connection has one
        self._transport = transport
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._writable.set()
        self._stop_pump()
        exchange = self._exchange
        self._exchange = None
        if exchange is not None:
            if exchange.head_done and not self._framed and exc is None:
                exchange.finish()  # a body without a length ends where the connection does
            elif exchange.head_done:
                exchange.fail(
                    UpstreamError("The worker broke off in the middle of its answer.", code="upstream_broken")
                )
            else:
                exchange.fail(UpstreamError("The worker closed the connection without an answer."))
        self._pool.forget(self)

    def usable(self) -> bool:
        """Idle, open, and no close or stray byte is waiting unread in the socket."""
        return not self.lost and not self._transport.is_closing() and not self._poll.poll(0)

    def abort(self) -> None:
        self._exchange = None
        self._stop_pump()
        if not self.lost:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Close it if it idled too long, fail its exchange if the worker was silent too long."""
        exchange = self._exchange
        if exchange is None:
            if now >= self.expires_at:
                self._transport.close()
        elif exchange.waiting and now - self._quiet_since > self._quiet_limit_s:
            when = "in the middle of its answer" if exchange.head_done else "before its answer began"
            exchange.fail(UpstreamTimeoutError(f"The worker was silent for {self._quiet_limit_s:g} s {when}."))
            self.abort()

    # sending

    def begin(self, head: bytes, body: Body, *, bodiless: bool, first_byte_s: float) -> UpstreamResponse:
        self._exchange = exchange = UpstreamResponse(self)
        self._reset()
        self._bodiless = bodiless
        self._quiet_since = self._loop.time()
        self._quiet_limit_s = first_byte_s
        if not isinstance(body, bytes | bytearray):
            self._transport.write(head)
            self._pump = self._loop.create_task(self._send(body, exchange))
        elif len(body) < JOIN_BELOW:
            self._pool.write_soon(self._transport, head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return exchange

    async def _send(self, body: AsyncIterator[bytes], exchange: UpstreamResponse) -> None:
        try:
            async for chunk in body:
                await self._writable.wait()
                if chunk:
                    self._quiet_since = self._loop.time()
                    self._transport.writelines((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
            self._transport.write(b"0\r\n\r\n")
        except Exception as error:  # noqa: BLE001  # whatever the body's source raises is for whoever awaits the answer
            exchange.fail(error)
            self.abort()
        finally:
            self._pump = None

    def _stop_pump(self) -> None:
        if self._pump is not None:
            self._pump.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # receiving

    def resume(self) -> None:
        self._quiet_since = self._loop.time()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked: whatever it is, it must not become the next answer
            self._transport.abort()
            return
        self._quiet_since = self._pool.last_byte_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reusable = False
            if not self._message_done:
                exchange.fail(UpstreamError(f"The worker's answer is not valid HTTP ({error})."))
                self.abort()
                return
        if self._message_done:
            self._finish(exchange)
        elif exchange.head_done:
            exchange.wake()
        else:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                exchange.fail(UpstreamError("The worker's response headers are too large."))
                self.abort()

    def _finish(self, exchange: UpstreamResponse) -> None:
        self._exchange = None
        exchange.finish()
        if self._reusable and self._pump is None:
            self.resume()  # its last read may have paused it
            self._pool.give_back(self)
        else:
            self._stop_pump()
            self._transport.close()

    # parser callbacks

    def on_message_begin(self) -> None:
        if self._message_done:  # bytes beyond the answer: the next one could not be told from them
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.head_done:  # trailers
            return
        name = name.lower()
        if name not in HOP_BY_HOP:
            if name == b"content-length":
                self._framed = True
            self._headers.append((name, value))
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise UpstreamError("unknown transfer-encoding")
            self._framed = True
        elif name == b"connection":
            tokens = {token.strip().lower() for token in value.split(b",")} - {b"close", b"keep-alive"}
            if tokens:
                self._named = tokens
        elif name == b"keep-alive" and (match := _KEEP_ALIVE_TIMEOUT.search(value)):
            self.idle_s = float(match[1]) - 1.0

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        exchange = self._exchange
        if status < 200:
            if status == 101:
                raise UpstreamError("unexpected upgrade")
            self._informational = True
            self._framed = False
            return
        if exchange is None or exchange.head_done:
            return
        if self._named is not None:
            headers = [item for item in headers if item[0] not in self._named]
        self._reusable = self._parser.should_keep_alive()
        self._quiet_limit_s = self._pool.stream_idle_s
        exchange.start(status, headers)
        if self._bodiless or status in (204, 304):
            # The parser would wait for the body that Content-Length speaks of and that never comes.
            self._reusable = False
            self._message_done = True

    def on_body(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and not self._message_done and exchange.add(data):
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._informational:
            self._informational = False
        else:
            self._message_done = True
