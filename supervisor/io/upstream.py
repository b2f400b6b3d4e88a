"""A pooled HTTP/1.1 client for the data path: one pool per worker, over loopback.

A connection goes back to the pool only when its response was read to the end and both sides may keep it. Closing a
response early closes its connection, which tells the worker that the client left.

No request is sent twice: an idle connection is polled for a pending close just before it is reused, and only a connection
attempt (no byte written yet) is repeated, once. A worker that loses a request on a connection that it had promised to keep
gets new ones from then on.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from supervisor.errors import UnreachableError
from supervisor.io.request_buffer import RequestBuffer
from supervisor.io.upstream_response import Headers, UpstreamResponse, WorkerResponse
from supervisor.io.upstream_wire import HOP_BY_HOP, Body, Connection

__all__ = ["HOP_BY_HOP", "Body", "Headers", "Upstream", "UpstreamPool", "UpstreamResponse", "WorkerResponse"]

SWEEP_S: Final = 0.25


class Upstream(Protocol):
    """Who answers a model's requests: a worker (`UpstreamPool`) or a remote."""

    loop: asyncio.AbstractEventLoop

    async def request(
        self, method: str, target: bytes, headers: Headers, body: Body = b"", *, first_byte_s: float | None = None
    ) -> UpstreamResponse:
        """Send a request and wait for the response's head. Cancellation closes the connection.

        `target` is path and query as they go on the wire; `headers` must not contain Host, Content-Length,
        Transfer-Encoding or Authorization, which are added here. A body of unknown length goes out chunked. A `RequestBuffer` is
        released once it can't be needed again.
        Raises UpstreamError (UnreachableError while nothing was sent), UpstreamTimeoutError.
        """
        ...


class UpstreamPool:
    """Connections to one worker. Use from one event loop; `close` it when the worker ends.

    `auth` is the Authorization header sent with every request; with `names_host` off requests bring their own Host. `idle_s`
    is how long an unused connection is kept when the worker sends no `Keep-Alive: timeout=N`: half of uvicorn's default.
    It may be silent for `patience_s`, whatever the other limits and a request say.
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
        self._unwritten: list[tuple[asyncio.Transport, bytes]] | None = None  # a list once a turn's first was written
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._keeps = True  # the worker does keep the connections that it says it keeps
        self.last_byte_at = 0.0  # loop time: it was alive then, whatever its health check says
        self.worked_at = 0.0  # loop time; see `works`

    @property
    def open_connections(self) -> int:
        """Connections now open, idle and busy."""
        return len(self._connections)

    @property
    def is_busy(self) -> bool:
        """Some request is under way."""
        return len(self._connections) > len(self._idle)

    def works(self) -> None:
        """It makes progress with what it was asked: until now it wasn't silent."""
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
        """A connection of its own, on which a GET was sent; it is the caller's. Raises UnreachableError."""
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
        """Write the first request of a loop iteration at once, and those that follow together at its end.

        Waking an idle worker costs more than the write, and it would fall asleep again between two of them. What is
        aborted meanwhile is never sent.
        """
        if self._unwritten is None:
            self._unwritten = []
            self.loop.call_soon(self._write)
            transport.write(data)
        else:
            self._unwritten.append((transport, data))

    def _write(self) -> None:
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
        """The worker closed a connection without an answer. `reused`: one that it was to keep for this request."""
        self._keeps = self._keeps and not reused

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self) -> Connection | None:
        now = self.loop.time()
        while self._idle:
            connection = self._idle.pop()  # the last used: the others may expire
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
                        self._timer = self.loop.call_later(SWEEP_S, self._sweep)
                    return connection
                connection.abort()
        raise UnreachableError("The worker closed new connections at once.")

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.check(now)
        self._timer = self.loop.call_later(SWEEP_S, self._sweep) if self._connections else None
