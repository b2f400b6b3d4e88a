"""uvicorn's httptools protocol with the guards it lacks.

A request's headers have a deadline and a size limit, its body may not stall, and a client may not stop reading for ever.
Ambiguous requests (Content-Length with Transfer-Encoding, several Hosts) are rejected before they get a scope. Trailers are
dropped. A response sent before the whole body arrived ends the connection, but only after a moment in which the rest of the
body is read and dropped: if bytes are unread at the close, the kernel discards the response. A rejection is a JSON error
response, and the connection closes. The scope has a `Disconnect`, so a request learns at once that its client
disconnected. If an application fails after its response began, its connection is cut, so the response never looks complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

import httptools
import structlog
from uvicorn._types import HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from supervisor.catalog.sections import LimitsConfig
from supervisor.dialects import dialect_of
from supervisor.dialects.openai import OPENAI
from supervisor.errors import InvalidRequestError, LlmuxError, MethodNotAllowedError, TooLargeError
from supervisor.http.request_id import STATE_KEY, request_id_of
from supervisor.http.response_cycle import ResponseCycle
from supervisor.proxy.disconnect import EXTENSION, Disconnect, ResponseBrokenError, ResponseOverError
from supervisor.proxy.error_response import error_body, error_headers

log = structlog.get_logger("llmux.http")

METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
PIPELINE_LIMIT: Final = 16
_UPGRADE_FIELDS: Final = frozenset((b"upgrade", b"connection", b"http2-settings"))


class HeadersTooLargeError(TooLargeError):
    """Request line and headers over their limit."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    code = "headers_too_large"


class RequestTimeoutError(LlmuxError):
    """The client began a request and did not finish its head in time."""

    status = HTTPStatus.REQUEST_TIMEOUT
    type = "invalid_request_error"
    code = "request_timeout"


class GuardedProtocol(HttpToolsProtocol):
    """Give it to uvicorn as `http=GuardedProtocol`, with `ws="none"`. One instance per connection."""

    head_limit = 64 * 1024  # bytes of request line and headers
    head_s = 10.0  # from a request's first byte (or the connection's start) to the end of its headers
    body_stall_s = 30.0  # between two pieces of a body
    write_stall_s = 120.0  # a client that reads nothing while we have something to send
    linger_s = 2.0  # for a client to read an early answer while it still sends
    linger_bytes = 64 * 1024 * 1024  # of what it sends meanwhile
    last_words_s = 1.0  # for a client to read the error before its response is cut

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False  # the application writes one canonical line per request
        self._in_head = True
        self._in_message = True
        self._head_bytes = 0
        self._bodiless_bytes = 0  # framing and trailers since the last piece of a body
        self._linger_left: int | None = None
        self._waiting_since = 0.0
        self._idle_since = 0.0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusal: LlmuxError | None = None
        self._upgrading = False
        self._disconnect: Disconnect
        self._extensions: dict[str, Disconnect]
        self.cycle: ResponseCycle
        self.pipeline: deque[tuple[ResponseCycle, Any]]  # type: ignore[assignment]  # all our cycles are ResponseCycles

    @classmethod
    def configure(cls, limits: LimitsConfig) -> None:
        """For new connections."""
        cls.head_limit, cls.head_s = limits.header_kib * 1024, limits.header_s

    # connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._disconnect = Disconnect(partial(_resume_reading, self.flow, transport))
        self._extensions = {EXTENSION: self._disconnect}
        self._waiting_since = self.loop.time()
        self._receive_timer = self.loop.call_later(self.head_s, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._receive_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._disconnect.happened()

    def data_received(self, data: bytes) -> None:
        if self._linger_left is not None:
            self._linger_left -= len(data)
            if self._linger_left < 0:
                self.transport.abort()
            return
        self._bodiless_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or InvalidRequestError("This is not a valid HTTP/1.1 request."))
            return
        if self._in_message:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > self.head_limit:
                    self._refuse(self._headers_too_large())
                    return
            elif self._bodiless_bytes > self.head_limit:
                self.transport.abort()
                return
            else:
                self._waiting_since = self.loop.time()
            if self._receive_timer is None:
                limit_s = self.head_s if self._in_head else self.body_stall_s
                self._receive_timer = self.loop.call_later(limit_s, self._check_progress)
        elif self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _linger(self) -> None:
        """End our side, and the connection soon after."""
        self._linger_left = self.linger_bytes
        self.transport.write_eof()
        if self._receive_timer is not None:
            self._receive_timer.cancel()
        self._receive_timer = self.loop.call_later(self.linger_s, self.transport.abort)

    def _check_progress(self) -> None:
        self._receive_timer = None
        if self.transport.is_closing() or not self._in_message:
            return
        now = self.loop.time()
        if not self._in_head and self.flow.read_paused:
            self._waiting_since = now  # the server is slow here, not the client
        limit_s = self.head_s if self._in_head else self.body_stall_s
        left_s = self._waiting_since + limit_s - now
        if left_s > 0:
            self._receive_timer = self.loop.call_later(left_s, self._check_progress)
        elif self._in_head:
            self._refuse(RequestTimeoutError(f"The request's headers were not complete after {limit_s:g} s."))
        else:
            self.transport.abort()

    # parser callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_message = self._in_head = True
        self._head_bytes = 0
        self._waiting_since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._check_head()
        self._in_head = False
        self._bodiless_bytes = 0
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        raw_path, query = _split(self.url)
        path = raw_path.decode("ascii")
        version = self.parser.get_http_version()
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": self.server,
            "state": {STATE_KEY: request_id_of(self.headers)},
            "extensions": self._extensions,  # type: ignore[typeddict-item]  # uvicorn types none of its own
        }
        self.headers = []  # trailers go there, not into the scope
        earlier, keep_alive = self.cycle, version != "1.0" and self.parser.should_keep_alive()
        self.cycle = ResponseCycle(self, keep_alive=keep_alive)
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, self.app)
            return
        self.flow.pause_reading()
        self.pipeline.appendleft((self.cycle, self.app))
        if len(self.pipeline) > PIPELINE_LIMIT:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._bodiless_bytes = 0
        if not self._upgrading:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if not self._upgrading:
            super().on_message_complete()

    def _check_head(self) -> None:
        """Raises for requests that llhttp accepts and llmux doesn't; an exception in a callback makes the parser fail."""
        hosts = framings = 0
        host = b""
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
                host = value
            elif name == b"content-length":
                framings += 1
            elif name == b"transfer-encoding":
                framings += 1
                if value.strip().lower() != b"chunked":
                    self._refusal = InvalidRequestError("Transfer-Encoding other than chunked is not supported.")
        if size > self.head_limit:
            self._refusal = self._headers_too_large()
        elif hosts > 1 or framings > 1:
            self._refusal = InvalidRequestError(
                "The request has several Host, Content-Length or Transfer-Encoding fields."
            )
        elif self.parser.get_method() not in METHODS:
            self._refusal = MethodNotAllowedError("This method is not supported.")
        elif self.url[:1] != b"/" and not self.url.lower().startswith(b"http://%b/" % host.strip().lower()):
            # A whole address counts more than the Host field, and only that one is checked.
            self._refusal = InvalidRequestError("The request's address names another host than its Host field.")
        if self._refusal is not None:
            raise self._refusal

    def _headers_too_large(self) -> HeadersTooLargeError:
        return HeadersTooLargeError(
            f"The request's headers are larger than {self.head_limit} bytes (limits.header_kib)."
        )

    def _decline_upgrade(self, rest: bytes) -> None:
        """Continue in HTTP/1.1: some clients offer h2c with every request, and then the parser skips the body."""
        method = self.parser.get_method()
        head = [method, b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in _UPGRADE_FIELDS:
                head += (name, b": ", value, b"\r\n")
        self._upgrading = False
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((*head, b"\r\n", rest)))

    def _refuse(self, error: LlmuxError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # a response would land in the middle of another
            return
        body = error_body(error, OPENAI)
        lines = [STATUS_LINE[error.status]]
        own = ((b"x-request-id", request_id_of(self.headers or [])), (b"connection", b"close"))
        for name, value in (*error_headers(error, body), *own):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        self._linger()

    # application

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if not self.cycle.keep_alive and self.cycle.response_complete and self.cycle.more_body:
            self._linger()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_at_idleness_in(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """One timer for all of a connection's requests: setting one for each would cost as much as parsing it."""
        now = self.loop.time()
        if self._in_message or not self.cycle.response_complete:
            self._idle_since = now
        left_s = self._idle_since + self.timeout_keep_alive - now
        if left_s > 0:
            self._look_at_idleness_in(left_s)
        else:
            self.transport.close()

    def _look_at_idleness_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: ResponseCycle, app: Any) -> None:  # type: ignore[override]  # all our cycles are
        task = self._disconnect.task = cycle.task = self.loop.create_task(self._run(cycle, app))
        self.tasks.add(task)

    async def _run(self, cycle: ResponseCycle, app: Any) -> None:
        try:
            await app(cycle.scope, cycle.receive, cycle.send)
        except ResponseBrokenError as broken:  # browsers, aiohttp, undici drop what they hold unread when it breaks
            cycle.cut(after_s=self.last_words_s if broken.told else 0.0)
        except ResponseOverError:
            cycle.cut()
        except asyncio.CancelledError:
            cycle.cut()
            raise
        except Exception:
            log.exception("http.application_failed", **_about(cycle.scope))
            await self._give_up(cycle)
        else:
            if not cycle.response_complete and not cycle.disconnected:
                log.error("http.response_incomplete", **_about(cycle.scope))
                await self._give_up(cycle)
        finally:
            self.tasks.discard(cycle.task)  # here: a callback of the task would be another turn of the loop
            cycle.on_response, cycle.task = lambda: None, None  # breaks reference cycles

    async def _give_up(self, cycle: ResponseCycle) -> None:
        if cycle.response_started:
            cycle.cut()
            return
        error = LlmuxError("An internal error occurred; the daemon's log has the details.")
        body = error_body(error, dialect_of(cycle.scope["path"]))
        own = ((b"x-request-id", cycle.scope["state"][STATE_KEY]), (b"connection", b"close"))
        headers = [*error_headers(error, body), *own]
        await cycle.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await cycle.send({"type": "http.response.body", "body": body, "more_body": False})


def _split(url: bytes) -> tuple[bytes, bytes]:
    """Path and query, as they are on the wire. Raises httptools.HttpParserInvalidURLError."""
    if url[:1] == b"/" and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query
    parsed = httptools.parse_url(url)
    return parsed.path, parsed.query or b""


def _about(scope: HTTPScope) -> dict[str, str]:
    # Not decoded: the decoded path could contain anything, also terminal control codes.
    path = scope["raw_path"].decode("latin-1")[:200]
    return {"method": scope["method"], "path": path, "request_id": scope["state"][STATE_KEY].decode()}


def _resume_reading(flow: FlowControl, transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        flow.resume_reading()
