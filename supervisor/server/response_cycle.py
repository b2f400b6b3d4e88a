"""One request and its response at the server: uvicorn's cycle with an optimised writer.

A response's headers are sent together with the first chunk of its body: uvloop writes at once, so two writes would be two
system calls here and two wake-ups at the client. If there is no body yet, the headers are sent alone in the loop's next
turn. The application's messages are checked as in uvicorn, but all headers at once.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from supervisor.errors import LlmuxError
from supervisor.server.slow_client import reset

_INVALID_IN_NAME: Final = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\\\[\]={} \t"A-Z]')
_INVALID_IN_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS: Final = (204, 304)


class ResponseCycle(RequestResponseCycle):
    """One for each request of a connection. Names of headers must be lowercase."""

    closes_connections = False  # every connection ends after its response

    def __init__(self, protocol: HttpToolsProtocol, *, keep_alive: bool) -> None:
        super().__init__(
            scope=protocol.scope,
            transport=protocol.transport,
            flow=protocol.flow,
            logger=protocol.logger,
            access_logger=protocol.access_logger,
            access_log=False,
            default_headers=protocol.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=protocol.expect_100_continue,
            keep_alive=keep_alive,
            on_response=protocol.on_response_complete,
        )
        self._loop = protocol.loop
        self._head = b""  # buffered until the body begins
        self._ends_with_connection = False  # does only the connection's end mark the body's end?
        self._failure: LlmuxError | None = None  # the reason why the request's body will never be complete
        self.task: asyncio.Task[None] | None = None

    async def receive(self) -> ASGIReceiveEvent:
        """ASGI's `receive`. Raises the LlmuxError of `fail`."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self.message_event.is_set():
                await self.message_event.wait()
            self.message_event.clear()
        if self._failure is not None:
            raise self._take_failure()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def fail(self, error: LlmuxError) -> None:
        """The rest of the request's body won't come: `receive` raises `error`."""
        self._failure = error
        self.message_event.set()

    def _take_failure(self) -> LlmuxError:
        assert self._failure is not None
        try:
            return self._failure
        finally:
            self._failure = None  # an error kept here would keep its traceback's frames

    def probe(self) -> bool:
        """Send harmless bytes that provoke a reset from a disconnected client. False: impossible.

        After the first chunk of an answer with a known length, nothing is sent: the next chunk provokes the reset.
        """
        if self.response_complete or self.transport.is_closing():
            return False
        if not self.response_started:
            if self.scope["http_version"] == "1.0":
                return False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # the one interim response that every client skips
        elif self.chunked_encoding and self.scope["method"] != "HEAD":
            self._flush_head()
            self.transport.write(b"0")  # a leading zero of the next chunk's size
        return True

    async def send(self, message: ASGISendEvent) -> None:
        """ASGI's `send`. Raises RuntimeError for messages that would not be valid HTTP."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._send_head(message["status"], [*self.default_headers, *message.get("headers", ())])
        elif message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"An ASGI message {message['type']!r} has no place in an HTTP response.")

    def cut(self) -> None:
        """Write the buffered bytes, and close the connection."""
        self._flush_head()
        if self._ends_with_connection and not self.response_complete:
            reset(self.transport)  # a plain end would look complete
        else:
            self.transport.close()

    def _flush_head(self) -> None:
        if self._head and not self.transport.is_closing():
            head, self._head = self._head, b""
            self.transport.write(head)

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.response_started:
            raise RuntimeError("The response has started already.")
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        names, values = list[bytes](), list[bytes]()
        closes = False
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            names.append(name)
            values.append(value)
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length = 0
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in value.lower():
                closes = True
        if _INVALID_IN_NAME.search(b"".join(names)) or _INVALID_IN_VALUE.search(b"".join(values)):
            raise RuntimeError(f"These headers can't be sent: {headers!r}")
        self.keep_alive = self.keep_alive and not closes and not self.more_body and not self.closes_connections
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            if self.scope["http_version"] == "1.0":  # knows no chunks
                self._ends_with_connection = True
            else:
                self.chunked_encoding = True
                lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        self._loop.call_soon(self._flush_head)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if not self.response_started or self.response_complete:
            raise RuntimeError("A piece of body came before the response's start or after its end.")
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            data = b""
        elif self.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                data += b"0\r\n\r\n"
        elif self._ends_with_connection:
            data = body
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (not more and self.expected_content_length):
                raise RuntimeError("The body is not as long as its Content-Length says.")
            data = body
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive and not self.more_body:
                self.transport.close()
            self.on_response()
