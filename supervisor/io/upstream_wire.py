"""One connection to a worker: an `asyncio.Protocol` that feeds an httptools parser, which feeds a `WorkerResponse`.

What one read brings becomes one chunk. Reading pauses above 256 KiB, so that a slow client slows its worker instead of
filling our memory. A connection tells its pool when it can be reused and when it is lost. The pool calls `check` for the
deadlines: a request has no timer of its own.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import httptools

from supervisor.errors import UpstreamError, UpstreamTimeoutError
from supervisor.io.request_buffer import RequestBuffer
from supervisor.io.upstream_response import Headers, WorkerResponse

if TYPE_CHECKING:
    from supervisor.io.upstream import UpstreamPool

Body = bytes | bytearray | RequestBuffer | AsyncIterator[bytes]

HEAD_LIMIT: Final = 64 * 1024
JOIN_BELOW: Final = 64 * 1024  # smaller bodies are written together with their head: one packet wakes the worker once

HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout\s*=\s*(\d+)", re.IGNORECASE)


def kept_s(promised_s: float) -> float:
    """How long to keep an idle connection that the worker keeps for `promised_s`: half of it, at least a second less.

    The worker counts from when it sent the last byte, we from when we read it, which is late on a busy machine.
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
        self._reset()
        self._promised = False  # the server has said how long it keeps the connection
        self.idle_s = pool.idle_s
        self._answered = False  # a request before this one
        self.expires_at = 0.0
        self.lost = False

    def _reset(self) -> None:
        self._named: set[bytes] | None = None
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
        del self._parser  # it refers to this object

    def usable(self) -> bool:
        """Open, with no close or stray byte unread in the socket."""
        return not self.lost and not self._transport.is_closing() and not self._poll.poll(0)

    def abort(self) -> None:
        self._response = None
        self._stop_pump()
        if not self.lost:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Close it if it was idle too long; fail its request if the worker was silent too long."""
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
        self._reset()
        self._bodiless = bodiless
        self._quiet_since = self._loop.time()
        self._quiet_limit_s = first_byte_s
        if isinstance(body, RequestBuffer) and body.size < JOIN_BELOW:
            assert body.data is not None, "released before"
            self._pool.write_soon(self._transport, head + body.data)
        else:
            self._transport.write(head)
            self._pump = self._loop.create_task(self._send(body, response))
        return response

    async def _send(self, body: RequestBuffer | AsyncIterator[bytes], response: WorkerResponse) -> None:
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
        except Exception as error:  # noqa: BLE001  # whoever awaits the response gets what the body's source raises
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
        if response is None:  # unrequested: it must not become the next response
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
            self._finish(response)
        elif response.head_done:
            response.wake()
        else:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                response.fail(UpstreamError("The worker's response headers are too large."))
                self.abort()

    def _finish(self, response: WorkerResponse) -> None:
        self._response = None
        response.finish()
        if self._reusable and self._pump is None:
            self._answered = True
            self.resume()  # its last read may have paused it
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
                self._named = tokens
        elif name == b"keep-alive" and (match := _KEEP_ALIVE_TIMEOUT.search(value)):
            self.idle_s = kept_s(float(match[1]))
            self._promised = True

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
        if self._named is not None:
            headers = [item for item in headers if item[0] not in self._named]
        # cpp-httplib (llama.cpp's server) promises to keep the connection but closes it after a stream; the next request
        # may be quicker.
        self._reusable = self._parser.should_keep_alive() and not (self._chunked and self._promised)
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
