"""A pooled HTTP/1.1 client for the data path: one pool for each worker, over loopback.

A request takes a `Connection` of its `UpstreamPool`: an `asyncio.Protocol` that feeds an httptools parser, which feeds a
`WorkerResponse`. The bytes of one read become one chunk. Reading pauses above 128 KiB, so that a slow client slows its worker
instead of filling our memory.

A connection returns to the pool only if its response was read to the end and both sides may keep it. Closing a response
early closes its connection, which shows the worker that the client has left. The pool calls `Connection.check` for the
deadlines: a request has no timer of its own.

No request is sent twice: an idle connection is polled for a pending close just before it is reused, and only a connection
attempt (no byte written yet) is repeated, once. After a worker has lost a request on a connection that it had promised to
keep, each request to it gets a new connection.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import AsyncIterator
from typing import Final, Protocol

import httptools

from supervisor.errors import UnreachableError, UpstreamError, UpstreamTimeoutError
from supervisor.host.store.request_buffer import RequestBuffer

Headers = list[tuple[bytes, bytes]]
Body = bytes | bytearray | RequestBuffer | AsyncIterator[bytes]

SWEEP_S: Final = 0.25
PAUSE_ABOVE: Final = 128 * 1024
HEAD_LIMIT: Final = 64 * 1024
JOIN_BELOW: Final = 64 * 1024  # smaller bodies are written together with their head: one packet wakes the worker once

HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout\s*=\s*(\d+)", re.IGNORECASE)


class UpstreamResponse(Protocol):
    """A response with a body that may still be arriving: a worker's (`WorkerResponse`) or a remote's.

    `headers` are lowercase, in order, duplicates kept, without hop-by-hop fields.
    """

    __slots__ = ()

    status: int
    headers: Headers

    @property
    def drained(self) -> bool:
        """Has the consumer read the whole body?"""
        ...

    async def next_chunk(self) -> bytes:
        """All that arrived since the last call, at least one byte; b"" after the end. Cancelling it is safe.

        Raises UpstreamError if the other side broke off early, UpstreamTimeoutError if it fell silent.
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
        """Release the response. Unless the body is complete, this closes the connection at once."""
        ...


class Upstream(Protocol):
    """A server that answers a model's requests: a worker (`UpstreamPool`) or a remote."""

    loop: asyncio.AbstractEventLoop

    async def request(
        self, method: str, target: bytes, headers: Headers, body: Body = b"", *, first_byte_s: float | None = None
    ) -> UpstreamResponse:
        """Send a request and wait for the response's head. Cancellation closes the connection.

        `target` is the raw path and query; `headers` must not contain Host, Content-Length, Transfer-Encoding or Authorization,
        which are added here. A body of unknown length is sent chunked. A `RequestBuffer` is released once no attempt needs it.
        Raises UpstreamError (UnreachableError while nothing was sent), UpstreamTimeoutError.
        """
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
                raise self._take_error()
            await self._wait_for_data()

    async def next_chunk(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._take_error()
            if self.complete:
                return b""
            await self._wait_for_data()
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
        """Does the consumer wait for the worker, rather than the worker for the consumer?"""
        return self._waiter is not None and not self._waiter.done()

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.head_done = True

    def add(self, data: bytes) -> bool:
        """Buffer a piece of the body. True: the buffer is full, so the connection should stop reading."""
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

    def _take_error(self) -> Exception:
        """Return the error and drop the reference: a raised error keeps its frames alive, and so the request's body."""
        assert self._error is not None
        try:
            return self._error
        finally:
            self._error = UpstreamError("The response has failed before.")

    def _wait_for_data(self) -> asyncio.Future[None]:
        """A future that is done once anything arrives. Not a coroutine, which would cost time for each piece of a stream."""
        assert not self.waiting, "one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


def idle_limit_s(promised_s: float) -> float:
    """The time to keep an idle connection that the worker keeps for `promised_s`: half of it, at least a second less.

    The worker counts from sending the last byte, we from reading it, which is late on a busy machine.
    """
    return min(promised_s / 2, promised_s - 1.0)


class Connection(asyncio.Protocol):
    """One connection to the worker; carries one request at a time."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._response: WorkerResponse | None = None
        self._pump: asyncio.Task[None] | None = None
        self._quiet_since = 0.0
        self._quiet_limit_s = 0.0
        self._headers: Headers = []
        self._reset_message()
        self._keep_alive_promised = False  # the server has sent a Keep-Alive timeout
        self.idle_s = pool.idle_s
        self._answered = False  # the connection has served a request before
        self.expires_at = 0.0
        self.lost = False

    def _reset_message(self) -> None:
        self._connection_options: set[bytes] | None = None
        self._bodiless = False
        self._framed = False
        self._informational = False
        self._chunked = False
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
        response = self._response
        self._response = None
        if response is not None:
            if response.head_done and not self._framed and exc is None:
                response.finish()  # a body without a length ends where the connection does
            elif response.head_done:
                response.fail(
                    UpstreamError("The worker broke off in the middle of its answer.", code="upstream_broken")
                )
            else:
                self._pool.lost_a_request(reused=self._answered)
                response.fail(UpstreamError("The worker closed the connection without an answer."))
        self._pool.forget(self)
        del self._parser  # the parser refers to this object

    def usable(self) -> bool:
        """Is the connection open, with neither a close nor a stray byte unread in the socket?"""
        return not self.lost and not self._transport.is_closing() and not self._poll.poll(0)

    def abort(self) -> None:
        self._response = None
        self._stop_pump()
        if not self.lost:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Close the connection after its idle limit; fail its request after the worker's silence limit."""
        response = self._response
        if response is None:
            if now >= self.expires_at:
                self._transport.close()
        elif response.waiting and now - max(self._quiet_since, self._pool.worked_at) > self._quiet_limit_s:
            when = "in the middle of its answer" if response.head_done else "before its answer began"
            response.fail(UpstreamTimeoutError(f"The worker was silent for {self._quiet_limit_s:g} s {when}."))
            self.abort()

    # sending

    def begin(
        self, head: bytes, body: RequestBuffer | AsyncIterator[bytes], *, bodiless: bool, first_byte_s: float
    ) -> WorkerResponse:
        self._response = response = WorkerResponse(self)
        self._reset_message()
        self._bodiless = bodiless
        self._quiet_since = self._loop.time()
        self._quiet_limit_s = first_byte_s
        if isinstance(body, RequestBuffer) and body.size < JOIN_BELOW:
            assert body.data is not None, "released before"
            self._pool.write_soon(self._transport, head + body.data)
        else:
            self._transport.write(head)
            self._pump = self._loop.create_task(self._send_body(body, response))
        return response

    async def _send_body(self, body: RequestBuffer | AsyncIterator[bytes], response: WorkerResponse) -> None:
        chunked = not isinstance(body, RequestBuffer)
        try:
            async for piece in body.pieces() if isinstance(body, RequestBuffer) else body:
                await self._writable.wait()
                if piece:
                    self._quiet_since = self._loop.time()
                    framed = (b"%x\r\n" % len(piece), piece, b"\r\n") if chunked else (piece,)
                    self._transport.writelines(framed)
            if isinstance(body, RequestBuffer):
                body.sent()
            else:
                self._transport.write(b"0\r\n\r\n")
        except Exception as error:  # noqa: BLE001  # the response raises the error of the body's source
            response.fail(error.with_traceback(None))
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
        response = self._response
        if response is None:  # unrequested data must not become the next response
            self._transport.abort()
            return
        self._quiet_since = self._pool.last_byte_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reusable = False
            if not self._message_done:
                response.fail(UpstreamError(f"The worker's answer is not valid HTTP ({error})."))
                self.abort()
                return
        if self._message_done:
            self._finish_response(response)
        elif response.head_done:
            response.wake()
        else:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                response.fail(UpstreamError("The worker's response headers are too large."))
                self.abort()

    def _finish_response(self, response: WorkerResponse) -> None:
        self._response = None
        response.finish()
        if self._reusable and self._pump is None:
            self._answered = True
            self.resume()  # the last read may have paused reading
            self._pool.give_back(self)
        else:
            self._stop_pump()
            self._transport.close()

    # parser callbacks

    def on_message_begin(self) -> None:
        if self._message_done:  # bytes after the response could be taken for the next one
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        if response is None or response.head_done:  # trailers
            return
        name = name.lower()
        if name not in HOP_BY_HOP:
            if name == b"content-length":
                self._framed = True
            self._headers.append((name, value))
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise UpstreamError("unknown transfer-encoding")
            self._framed = self._chunked = True
        elif name == b"connection":
            tokens = {token.strip().lower() for token in value.split(b",")} - {b"close", b"keep-alive"}
            if tokens:
                self._connection_options = tokens
        elif name == b"keep-alive" and (match := _KEEP_ALIVE_TIMEOUT.search(value)):
            self.idle_s = idle_limit_s(float(match[1]))
            self._keep_alive_promised = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        response = self._response
        if status < 200:
            if status == 101:
                raise UpstreamError("unexpected upgrade")
            self._informational = True
            self._framed = False
            return
        if response is None or response.head_done:
            return
        if self._connection_options is not None:
            headers = [item for item in headers if item[0] not in self._connection_options]
        # cpp-httplib (llama.cpp's server) promises to keep the connection but closes it after a stream, maybe after the
        # next request was sent.
        self._reusable = self._parser.should_keep_alive() and not (self._chunked and self._keep_alive_promised)
        self._quiet_limit_s = self._pool.stream_idle_s
        response.start(status, headers)
        if self._bodiless or status in (204, 304):
            # The parser would wait for the body that Content-Length announces and that never comes.
            self._reusable = False
            self._message_done = True

    def on_body(self, data: bytes) -> None:
        response = self._response
        if response is not None and not self._message_done and response.add(data):
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._informational:
            self._informational = False
        else:
            self._message_done = True


class UpstreamPool:
    """Connections to one worker. Use from one event loop; `close` it when the worker ends.

    `auth` is the Authorization header sent with every request; with `names_host` off requests bring their own Host. `idle_s`
    is the time to keep an unused connection if the worker sends no `Keep-Alive: timeout=N`: half of uvicorn's default.
    The worker may be silent for `patience_s`, even if other limits or the request's are shorter.
    """

    def __init__(
        self,
        host: str,
        port: int,
        auth: str | None = None,
        *,
        connect_s: float = 2.0,
        idle_s: float = 2.5,
        first_byte_s: float = 300.0,
        stream_idle_s: float = 120.0,
        patience_s: float = 0.0,
        names_host: bool = True,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.idle_s = idle_s
        self.stream_idle_s = max(patience_s, stream_idle_s)
        self._patience_s = patience_s
        self._first_byte_s = first_byte_s
        self._connect_s = connect_s
        self._address = (host, port)
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        own = " HTTP/1.1\r\n" + (f"host: {authority}\r\n" if names_host else "")
        own += f"authorization: {auth}\r\n" if auth else ""
        self._own_fields = own.encode("latin-1")
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._unwritten: list[tuple[asyncio.Transport, bytes]] | None = (
            None  # a list once the first write of a loop iteration was done
        )
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._keeps = True  # the worker keeps connections as it promises
        self.last_byte_at = 0.0  # loop time: the worker was alive then, even if its health check fails
        self.worked_at = 0.0  # loop time; see `note_progress`

    @property
    def open_connections(self) -> int:
        """Connections now open, idle and busy."""
        return len(self._connections)

    @property
    def is_busy(self) -> bool:
        """Is any request under way?"""
        return len(self._connections) > len(self._idle)

    def note_progress(self) -> None:
        """Note that the worker makes progress with its requests: the silence limit counts from now."""
        self.worked_at = self.loop.time()

    async def request(
        self, method: str, target: bytes, headers: Headers, body: Body = b"", *, first_byte_s: float | None = None
    ) -> WorkerResponse:
        """See `Upstream`."""
        parts = [method.encode("ascii"), b" ", target, self._own_fields]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if isinstance(body, bytes | bytearray):
            body = RequestBuffer(data=body)
        if not isinstance(body, RequestBuffer):
            parts.append(b"transfer-encoding: chunked\r\n\r\n")
        elif body.size or method in ("POST", "PUT", "PATCH"):
            parts.append(b"content-length: %d\r\n\r\n" % body.size)
        else:
            parts.append(b"\r\n")
        connection = self._take_idle() or await self._connect()
        response = connection.begin(
            b"".join(parts),
            body,
            bodiless=method == "HEAD",
            first_byte_s=max(self._patience_s, self._first_byte_s if first_byte_s is None else first_byte_s),
        )
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    async def open(self, target: bytes, headers: Headers) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a separate connection and send a GET on it; the caller owns it. Raises UnreachableError."""
        lines = [b"GET ", target, self._own_fields, *(b"%b: %b\r\n" % field for field in headers), b"\r\n"]
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(*self._address)
        except (TimeoutError, OSError) as error:
            raise UnreachableError(f"The worker can't be reached ({error}).") from error
        writer.writelines(lines)
        return reader, writer

    def close(self) -> None:
        """Close idle connections; busy ones close when their response ends."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    # called by connections

    def write_soon(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write the first request of a loop iteration at once, and the following ones together at its end.

        Waking an idle worker costs more than the write, and the worker would fall asleep again between two writes. Requests
        aborted meanwhile are never sent.
        """
        if self._unwritten is None:
            self._unwritten = []
            self.loop.call_soon(self._write_pending)
            transport.write(data)
        else:
            self._unwritten.append((transport, data))

    def _write_pending(self) -> None:
        unwritten, self._unwritten = self._unwritten or (), None
        for transport, data in unwritten:
            if not transport.is_closing():
                transport.write(data)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request."""
        if self._closed or not self._keeps or connection.idle_s <= 0:
            connection.abort()
            return
        connection.expires_at = self.loop.time() + connection.idle_s
        self._idle.append(connection)

    def lost_a_request(self, *, reused: bool) -> None:
        """Note that the worker closed a connection without an answer. `reused`: the connection had served a request before."""
        self._keeps = self._keeps and not reused

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self) -> Connection | None:
        now = self.loop.time()
        while self._idle:
            connection = self._idle.pop()  # the most recently used, so that the others may expire
            if connection.expires_at > now and connection.usable():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        for attempt in (1, 2):
            try:
                async with asyncio.timeout(self._connect_s):
                    _, connection = await self.loop.create_connection(lambda: Connection(self), *self._address)
            except TimeoutError as error:
                raise UnreachableError("The worker did not accept a connection in time.") from error
            except OSError as error:
                if attempt == 2:
                    raise UnreachableError(f"The worker can't be reached ({error.strerror or error}).") from error
            else:
                if connection.usable():
                    self._connections.add(connection)
                    if self._timer is None:
                        self._timer = self.loop.call_later(SWEEP_S, self._check_deadlines)
                    return connection
                connection.abort()
        raise UnreachableError("The worker closed new connections at once.")

    def _check_deadlines(self) -> None:
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.check(now)
        self._timer = self.loop.call_later(SWEEP_S, self._check_deadlines) if self._connections else None
