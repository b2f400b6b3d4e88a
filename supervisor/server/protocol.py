"""uvicorn's httptools protocol with the guards it lacks.

The headers of a request have a deadline and a size limit. Its body has a deadline and a minimum rate; reading the answer has a
minimum rate. A client has a limited number of connections, and may close its sending side before it has the answer.
Ambiguous requests (Content-Length with Transfer-Encoding, not exactly one Host) are rejected before they get a scope. Trailers
are dropped. A response sent before the whole body arrived ends the connection, but only after a moment in which the rest of the
body is read and dropped: if bytes are unread at the close, the kernel discards the response. A rejection is a JSON error
response, and the connection closes. The scope has a `Disconnect`, which reports at once that the client disconnected. If an
application fails after its response began, its connection is cut, so the response never looks complete.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter, deque
from functools import partial
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import structlog
from uvicorn._types import HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.dialects import dialect_of
from supervisor.dialects.openai import OPENAI
from supervisor.errors import InvalidRequestError, LlmuxError, RateLimitError
from supervisor.gateway.disconnect import EXTENSION, Disconnect, ResponseOverError, Scope
from supervisor.gateway.error_response import error_body, error_headers
from supervisor.gateway.head import STATE_KEY as HEAD
from supervisor.gateway.head import RequestHead
from supervisor.gateway.tunnel import EXTENSION as TUNNEL
from supervisor.server.hang_ups import DISCONNECTS, HANG_UPS, HalfClosed
from supervisor.server.request_head import headers_too_large, refused_head, split_url, without_upgrade
from supervisor.server.request_id import STATE_KEY, request_id_of
from supervisor.server.response_cycle import ResponseCycle
from supervisor.server.slow_client import (
    RequestTimeoutError,
    SlowReader,
    SlowSender,
    read_while_blocked,
    resume_reading,
)

log = structlog.get_logger("llmux.http")

PIPELINE_LIMIT: Final = 16
TUNNEL_SILENT_S: Final = 30.0
_TUNNEL_BUFFER: Final = 64 * 1024  # bytes from the client; the server stops reading at twice as many
_connections: Counter[str] = Counter()  # open ones, by the client's address


class TooManyConnectionsError(RateLimitError):
    """The client's address has the maximum number of connections."""

    code = "too_many_connections"


class TunnelledClient:
    """A client with a WebSocket: its bytes, and the time of the last traffic."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self.received = asyncio.StreamReader(_TUNNEL_BUFFER, loop)
        self.received.set_transport(transport)
        self.last_at = loop.time()  # time of the last traffic, in either direction
        self._loop = loop

    def feed(self, data: bytes) -> None:
        """Accept bytes from the client."""
        self.last_at = self._loop.time()
        self.received.feed_data(data)

    def is_silent(self) -> bool:
        """Was there no traffic for so long that the client counts as not reading?"""
        return self._loop.time() - self.last_at >= TUNNEL_SILENT_S


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Give the class to uvicorn as `http=GuardedProtocol`, with `ws="none"`."""

    head_limit = 64 * 1024  # bytes of request line and headers
    head_s = 10.0  # from a request's first byte (or the connection's start) to the end of its headers
    body_s = 600.0  # from the first piece of a body to its end
    body_window_s = 30.0  # window for the minimum rate of a client's body
    read_window_s = 120.0  # window for the minimum rate of a client's reading
    least_bytes_per_s = 1024.0  # 0: any byte within a window is enough
    most_connections = 1024  # of a client's address; 0: any number
    linger_s = 2.0  # for a client to read an early answer while it still sends
    linger_bytes = 64 * 1024 * 1024  # the most bytes that it may send meanwhile

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
        self._slow_sender: SlowSender | None = None
        self._slow_reader: SlowReader | None = None
        self._half_closed: HalfClosed | None = None
        self._watched_descriptor: int | None = (
            None  # the connection's descriptor, while the server only watches for its end
        )
        self._has_ended = False  # the client has closed its side
        self._address: str | None = None  # counted in `_connections`
        self._serving: ResponseCycle | None = None
        self._refusal: LlmuxError | None = None
        self._upgrading = False
        self._wants_tunnel = False
        self._tunnelled: TunnelledClient | None = None
        self._disconnect: Disconnect
        self._extensions: dict[str, object]
        self.cycle: ResponseCycle
        self.pipeline: deque[tuple[ResponseCycle, Any]]  # type: ignore[assignment]  # all our cycles are ResponseCycles

    @classmethod
    def configure(cls, limits: LimitsConfig) -> None:
        """Set the limits for new connections."""
        cls.head_limit, cls.head_s = limits.header_kib * 1024, limits.header_s
        cls.body_s, cls.least_bytes_per_s = limits.body_s, limits.least_bytes_per_s
        cls.most_connections = limits.connections_per_client

    # connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        HANG_UPS.open()
        resume = partial(resume_reading, self.flow, transport)
        self._disconnect = Disconnect(resume, self._read_while_blocked, self._wait_long)
        self._extensions = {EXTENSION: self._disconnect}
        self._waiting_since = self.loop.time()
        self._receive_timer = self.loop.call_later(self.head_s, self._check_progress)
        if self.client is not None:
            self._address = self.client[0]
            _connections[self._address] += 1
            if 0 < self.most_connections < _connections[self._address]:
                others = _connections[self._address] - 1
                message = f"Your address has {others} connections (limits.connections_per_client)."
                self._refuse(TooManyConnectionsError(message, retry_after_s=5.0))

    def _read_while_blocked(self) -> int | None:
        """See `Disconnect`."""
        if self._tunnelled is not None and self._tunnelled.is_silent():
            return 0  # it blocks the worker like a client that reads nothing
        return read_while_blocked(self.flow, self.transport)

    def _wait_long(self) -> None:
        """Read nothing until the answer is sent. `HANG_UPS` reports the connection's end."""
        if self._watched_descriptor is None and not (
            self._has_ended or self._in_message or self.transport.is_closing()
        ):
            self._watched_descriptor = self.transport.get_extra_info("socket").fileno()
            self.flow.pause_reading()
            HANG_UPS.watch(self._watched_descriptor, select.EPOLLRDHUP, self._resume_after_wait)

    def _resume_after_wait(self) -> None:
        self._stop_end_watch()
        self.flow.resume_reading()

    def _stop_end_watch(self) -> None:
        if self._watched_descriptor is not None:
            HANG_UPS.forget(self._watched_descriptor)
            self._watched_descriptor = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._tunnelled is not None:
            self._tunnelled.received.feed_eof()
        self._unset_keepalive_if_required()
        self._stop_receive_timer()
        for watch in (self._slow_reader, self._half_closed):
            if watch is not None:
                watch.close()
        self._stop_end_watch()
        if self._address is not None:
            _connections[self._address] -= 1
            if not _connections[self._address]:
                del _connections[self._address]
        self._refusal = None  # breaks a reference cycle through the error's traceback
        DISCONNECTS.call(self._disconnect.happened)

    def eof_received(self) -> bool:  # type: ignore[override]  # as in asyncio
        """Always True, because this class closes the connection itself: see `HalfClosed` while an answer is due, else `DISCONNECTS`."""
        serving, self._has_ended = self._serving, True
        self._stop_end_watch()
        if self._tunnelled is not None:
            self._tunnelled.received.feed_eof()  # a WebSocket ends by frames: this client has disconnected
        elif serving is not None and not serving.response_complete:
            if self._linger_left is not None:  # the answer to a body that failed is on its way
                return True
            if not self._in_message:
                self.cycle.keep_alive = False
                DISCONNECTS.call(partial(self._probe_half_closed, serving))
                return True
        DISCONNECTS.call(self.transport.close)  # later, since closing is the slowest part
        return True

    def _probe_half_closed(self, serving: ResponseCycle) -> None:
        """Find out whether the client disconnected, or waits for this answer. Closes the connection if the client is gone."""
        if self.transport.is_closing():
            return
        self._half_closed = HalfClosed(self.transport, serving.probe)
        if not self._half_closed.is_alive():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._tunnelled is not None:
            self._tunnelled.feed(data)
            return
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
            if self._in_message and not self._in_head:
                self._fail_body(InvalidRequestError("The chunks of the request's body are malformed."))
            else:
                self._refuse(self._refusal or InvalidRequestError("This is not a valid HTTP/1.1 request."))
            return
        if self._in_message:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > self.head_limit:
                    self._refuse(headers_too_large(self.head_limit))
                    return
            elif self._bodiless_bytes > self.head_limit:
                self.transport.abort()
                return
            else:
                if self._slow_sender is None:
                    self._slow_sender = SlowSender(
                        self.loop.time(),
                        window_s=self.body_window_s,
                        bytes_per_s=self.least_bytes_per_s,
                        limit_s=self.body_s,
                    )
                    self._stop_receive_timer()  # the head's
                self._slow_sender.received += len(data)
            if self._receive_timer is None:
                limit_s = self.head_s if self._in_head else min(self.body_window_s, self.body_s)
                self._receive_timer = self.loop.call_later(limit_s, self._check_progress)
        else:
            self._stop_receive_timer()

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._slow_reader is None:
            self._slow_reader = SlowReader(
                self.loop, self.transport, window_s=self.read_window_s, bytes_per_s=self.least_bytes_per_s
            )
        self._slow_reader.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._slow_reader is not None:
            self._slow_reader.resumed()

    def _close_soon(self) -> None:
        """End the server's side now, and the connection soon after."""
        self._linger_left = self.linger_bytes
        self.transport.write_eof()
        self._stop_receive_timer()
        self._receive_timer = self.loop.call_later(self.linger_s, self.transport.abort)

    def _check_progress(self) -> None:
        self._receive_timer = None
        if self.transport.is_closing() or not self._in_message:
            return
        now = self.loop.time()
        if self._in_head:
            left_s = self._waiting_since + self.head_s - now
            if left_s <= 0:
                self._refuse(RequestTimeoutError(f"The request's headers were not complete after {self.head_s:g} s."))
                return
        else:
            assert self._slow_sender is not None
            error = self._slow_sender.refused(now, we_are_slow=self.flow.read_paused)
            if error is not None:
                self._fail_body(error)
                return
            left_s = self._slow_sender.next_at - now
        self._receive_timer = self.loop.call_later(max(0.0, left_s), self._check_progress)

    def _fail_body(self, error: LlmuxError) -> None:
        """The request's body won't be complete. The application responds with `error`, unless its response has begun."""
        if self.cycle.response_started:
            self.transport.abort()
            return
        self._linger_left = self.linger_bytes
        self.cycle.fail(error)

    # parser callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_message = self._in_head = True
        self._head_bytes = 0
        self._slow_sender = None
        self._waiting_since = self.loop.time()

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self._refusal = refused_head(self.parser.get_method(), version, self.url, self.headers, self.head_limit)
        if self._refusal is not None:
            raise self._refusal  # an exception in a callback makes the parser fail
        self._in_head = False
        self._bodiless_bytes = 0
        if self.parser.should_upgrade():
            self._upgrading = True
            offered = [value.lower() for name, value in self.headers if name == b"upgrade"]
            self._wants_tunnel = self.parser.get_method() == b"GET" and offered == [b"websocket"]
            return
        raw_path, query = split_url(self.url)
        head = RequestHead(self.headers)
        path = raw_path.decode("ascii")
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
            "state": {STATE_KEY: request_id_of(head.request_id), HEAD: head},
            "extensions": self._extensions,  # type: ignore[typeddict-item]  # uvicorn types none of its own
        }
        if self._wants_tunnel:
            self._wants_tunnel = False
            self.scope["extensions"] = {**self._extensions, TUNNEL: self}  # type: ignore[dict-item]  # the same
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

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the request again without the upgrade: some clients offer h2c with every request, and the parser skips the body then."""
        parser, self.parser = self.parser, httptools.HttpRequestParser(self)
        self._upgrading = False
        head = without_upgrade(parser.get_method(), parser.get_http_version(), self.url, self.headers)
        self.data_received(head + rest)

    def _refuse(self, error: LlmuxError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # a response would land in the middle of another
            return
        body = error_body(error, OPENAI)
        lines = [STATUS_LINE[error.status]]
        given = next((value for name, value in self.headers or () if name == b"x-request-id"), None)
        own = ((b"x-request-id", request_id_of(given)), (b"connection", b"close"))
        for name, value in (*error_headers(error, body), *own):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        self._close_soon()

    # WebSockets: see `gateway.tunnel.Client`

    def begin(self, head: bytes) -> asyncio.StreamReader:
        """Answer the handshake. From now on the client's bytes go to the worker."""
        self._unset_keepalive_if_required()
        self._tunnelled = TunnelledClient(self.loop, self.transport)
        self.flow.resume_reading()
        self.transport.write(head)
        self.cycle.response_started = True
        return self._tunnelled.received

    async def write(self, data: bytes) -> None:
        """Send bytes, after the client has read enough of the earlier ones."""
        assert self._tunnelled is not None
        self._tunnelled.last_at = self.loop.time()
        if self.flow.write_paused:
            await self.flow.drain()
        self.transport.write(data)

    # application

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._stop_end_watch()
        self.flow.resume_reading()
        if not self.cycle.keep_alive and self.cycle.response_complete and self.cycle.more_body:
            self._close_soon()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._schedule_idle_check(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. One timer serves all of its requests: a timer for each would cost as much as parsing."""
        now = self.loop.time()
        if self._in_message or not self.cycle.response_complete:
            self._idle_since = now
        left_s = self._idle_since + self.timeout_keep_alive - now
        if left_s > 0:
            self._schedule_idle_check(left_s)
        else:
            self.transport.close()

    def _schedule_idle_check(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: ResponseCycle, app: Any) -> None:  # type: ignore[override]  # all our cycles are
        self._serving = cycle
        task = self._disconnect.task = cycle.task = self.loop.create_task(self._run(cycle, app))
        self.tasks.add(task)

    async def _run(self, cycle: ResponseCycle, app: Any) -> None:
        try:
            await app(cycle.scope, cycle.receive, cycle.send)
        except ResponseOverError:
            cycle.cut()
        except asyncio.CancelledError:
            cycle.cut()
            raise
        except Exception:
            log.exception("http.application_failed", **_request_fields(cycle.scope))
            await self._answer_internal_error(cycle)
        else:
            if not cycle.response_complete and not cycle.disconnected:
                log.error("http.response_incomplete", **_request_fields(cycle.scope))
                await self._answer_internal_error(cycle)
        finally:
            self.tasks.discard(cycle.task)  # here: a callback of the task would run in another turn of the loop
            cycle.on_response, cycle.task = lambda: None, None  # breaks reference cycles

    async def _answer_internal_error(self, cycle: ResponseCycle) -> None:
        if cycle.response_started:
            cycle.cut()
            return
        error = LlmuxError("An internal error occurred; the daemon's log has the details.")
        dialect, request_id = dialect_of(cast("Scope", cycle.scope)), cycle.scope["state"][STATE_KEY]
        body = error_body(error, dialect)
        own = ((b"x-request-id", request_id), (b"connection", b"close"))
        headers = [*error_headers(error, body), *own, *dialect.headers(request_id)]
        await cycle.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await cycle.send({"type": "http.response.body", "body": body, "more_body": False})


def _request_fields(scope: HTTPScope) -> dict[str, str]:
    # Not decoded: the decoded path could contain anything, also terminal control codes.
    path = scope["raw_path"].decode("latin-1")[:200]
    return {"method": scope["method"], "path": path, "request_id": scope["state"][STATE_KEY].decode()}
