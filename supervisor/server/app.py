"""The application: authorises every request, then runs inference (pure ASGI) or everything else (a Starlette application).

It is the only renderer of errors: every `LlmuxError` that is raised before anything was sent becomes an error response
here. Bugs go to the server protocol, which logs them and responds if nothing was sent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from typing import Final, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from supervisor.api import routing
from supervisor.api.batches import FILES
from supervisor.api.daemon import UPGRADE
from supervisor.api.jobs import check_line
from supervisor.api.operation import Api
from supervisor.daemon.configuration.editing import Editor
from supervisor.daemon.configuration.reload import Reloader
from supervisor.daemon.configuration.sets import Sets
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.handover.handover import Handover
from supervisor.dialects import DIALECTS, dialect_of
from supervisor.dialects.openai import OpenAI
from supervisor.engine.ticket import HandedOverError
from supervisor.errors import LlmuxError, MethodNotAllowedError, NotFoundError, TooLargeError, UnavailableError
from supervisor.gateway.body.body import read_body
from supervisor.gateway.dialect import Dialect, ForDaemonError
from supervisor.gateway.disconnect import Message, Receive, Scope, Send
from supervisor.gateway.error_response import error_body, error_event, error_headers
from supervisor.gateway.forward import processing_ms
from supervisor.gateway.head import head_of
from supervisor.gateway.request import Request
from supervisor.gateway.tunnel import client_of
from supervisor.gateway.tunnel import refuse as refuse_tunnel
from supervisor.host.store.request_buffer import Bytes, RequestBuffer
from supervisor.jobs.inference import Answer
from supervisor.jobs.job import KEY, Inference
from supervisor.server import jobs, ui
from supervisor.server.auth import Auth, restrict_to_port, scope_for
from supervisor.server.protocol import GuardedProtocol
from supervisor.server.relay import relay
from supervisor.server.request_id import STATE_KEY

MOST_PATH_INFOS: Final = 1024
LONGEST_PATH: Final = 256
SAFE = ("GET", "HEAD", "OPTIONS")

_BASE = re.compile("^/+((?:(?:v1|v2|api)(?=/))?)(?:/+(?=/))?")
_NOT_OFFERED = {
    ("POST", "/v1/responses/compact"): "Send the conversation again with a summary in place of its older items.",
    ("POST", "/v1/complete"): "Ask /v1/messages.",
}


class _PathInfo(NamedTuple):
    """The scope and kind of a method and path, for clients of one dialect, by the configuration."""

    scope: str | None  # that a key needs
    is_inference: bool


class Application:
    """The daemon's ASGI application."""

    def __init__(
        self,
        daemon: Daemon,
        reloader: Reloader,
        handover: Handover | None = None,
        extra_ports: Mapping[int, str] | None = None,
    ) -> None:
        """`extra_ports`: ports that serve only a part of the paths, each with the key of `server` that names it."""
        self._daemon = daemon
        self._extra_ports = extra_ports
        self._auth: Auth
        self._starlette = Starlette(
            routes=[
                *routing.routes(Api(daemon, reloader, Editor(daemon, reloader), Sets(daemon, reloader), handover)),
                *(route for dialect in DIALECTS for route in dialect.routes(daemon)),
                *ui.routes(),
            ],
            exception_handlers={LlmuxError: _render_error, HTTPException: self._routing_error, Exception: _reraise},
        )
        self._starlette.router.redirect_slashes = False  # paths must match exactly: /health/ is not /health
        daemon.on_configure.append(self._configure)
        self._configure()

    def _configure(self) -> None:
        catalog = self._daemon.catalog
        self._path_infos: dict[tuple[OpenAI, str, str], _PathInfo] = {}
        self._auth = Auth(self._daemon.keyring, catalog.server, self._daemon.local_key)
        GuardedProtocol.configure(catalog.limits)

    def send_job(self, job: Inference, body: bytes) -> Awaitable[Answer]:
        """See `jobs.inference.Send`."""
        return jobs.send(self._daemon, job, body)

    def check_line(self, endpoint: str, body: Bytes) -> Awaitable[tuple[str | None, Bytes]]:
        """See `jobs.batches.Check`."""
        return check_line(self._daemon, endpoint, body)

    def close(self) -> None:
        """End the endless responses. The event streams first send the records of requests that have ended."""
        self._daemon.requests.record()
        self._daemon.hub.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        assert scope["type"] == "http"
        if b"//" in scope["raw_path"]:  # of a base URL that ends with a slash, or has two
            scope["path"] = _BASE.sub(r"/\1", scope["path"], count=1)
        dialect = dialect_of(scope)
        request_id = scope["state"][STATE_KEY]
        own = dialect.headers(request_id)
        request = Request(request_id, asyncio.get_running_loop().time(), dialect, extra=own)
        try:
            if self._extra_ports and (key := self._extra_ports.get(scope["server"][1])) is not None:
                restrict_to_port(key, scope, dialect)
            if self._daemon.successor is not None:
                await self._relay(scope, receive, send, request)
                return
            head, gateway = head_of(scope), self._daemon.gateway
            method, path = scope["method"], scope["path"]
            info = self._path_infos.get((dialect, method, path)) or self._path_info(dialect, method, path)
            if head.origin is not None and (cors := self._auth.cors(scope, info.scope)):
                request.extra = own + cors
                if method == "OPTIONS":
                    await Response(status_code=204)(scope, receive, _with_common_headers(send, request))
                    return
            request.key = scope["state"][KEY] = self._auth.authorize(head, dialect, info.scope)
            is_inference = info.is_inference
            if not is_inference and (pattern := gateway.routes.pattern(scope)) is not None:
                is_inference = not self._has_route(scope)
                if is_inference:
                    path = scope["path"] = pattern  # the worker gets the client's path
            if not is_inference and client_of(scope) is not None:
                raise refuse_tunnel(path)
            if is_inference and not dialect.is_for_daemon(method, path, scope["query_string"]):
                try:
                    await gateway(scope, receive, send, request)
                except ForDaemonError as for_daemon:
                    await self._answer_by_daemon(
                        for_daemon, dialect, scope, receive, _with_common_headers(send, request), request
                    )
            else:
                await self._run_starlette(scope, receive, _with_common_headers(send, request), request)
        except HandedOverError:
            await self._relay(scope, receive, send, request)
        except LlmuxError as error:
            await error_response(error, dialect)(scope, receive, _with_common_headers(send, request))

    def _path_info(self, dialect: OpenAI, method: str, path: str) -> _PathInfo:
        if len(self._path_infos) >= MOST_PATH_INFOS:  # clients choose the paths, but few make sense
            self._path_infos.clear()
        found = _PathInfo(scope_for(path, dialect), self._daemon.gateway.routes.serves(method, path, dialect))
        if found.is_inference or len(path) <= LONGEST_PATH:
            self._path_infos[dialect, method, path] = found
        return found

    async def _relay(self, scope: Scope, receive: Receive, send: Send, request: Request) -> None:
        """Relay the request to the successor, which answers it from the beginning."""
        upstream, dialect, body = self._daemon.successor, request.dialect, request.waiting
        assert upstream is not None
        is_started = request.answering
        try:
            if body is None:
                body = RequestBuffer(self._daemon.bodies)
                body.keep(await self._read_whole_body(scope, receive, body))
            original = body.source or body
            await relay(scope, send, original, upstream, request.request_id, dialect, is_started=is_started)
        except LlmuxError as error:
            if is_started:
                event = error_event(error, dialect)
                await send({"type": "http.response.body", "body": event, "more_body": False})
                return
            await error_response(error, dialect)(scope, receive, _with_common_headers(send, request))
        finally:
            if body is not None:
                body.release()

    async def _read_whole_body(self, scope: Scope, receive: Receive, buffer: RequestBuffer) -> Bytes:
        """Read the body of a request that another daemon answers. Raises LlmuxError."""
        try:
            return await read_body(scope, receive, self._daemon.catalog.limits.body_mib * 1024 * 1024, buffer)
        except TooLargeError as error:
            if _is_upload(scope):  # this connection ends, and the client's next one goes to the other daemon
                raise UnavailableError("Another llmux took over; send the file again.", retry_after_s=1) from error
            raise

    async def _answer_by_daemon(
        self,
        for_daemon: ForDaemonError,
        dialect: OpenAI,
        scope: Scope,
        receive: Receive,
        send: Send,
        request: Request,
    ) -> None:
        """Answer a request on a path of inference by the daemon itself. If there is a successor, raises HandedOverError."""
        body = request.waiting
        assert body is not None
        try:
            self._auth.authorize(head_of(scope), dialect, for_daemon.scope)
            await self._daemon.settled.wait()
        except BaseException:
            body.release()
            raise
        if self._daemon.successor is not None:
            raise HandedOverError
        response = await dialect.answer_in_daemon(self._daemon, scope, for_daemon.fields, body.take())
        await response(scope, receive, send)

    async def _run_starlette(self, scope: Scope, receive: Receive, send: Send, request: Request) -> None:
        await self._daemon.requests.recorded()  # the answer must include all requests that ended before
        await asyncio.sleep(0)  # also in the log: its lines are written at the end of a turn
        if scope["method"] not in SAFE and scope["path"] != UPGRADE:
            # During a handover, only the daemon that goes on may make changes.
            await self._daemon.settled.wait()
            if self._daemon.successor is not None:
                raise HandedOverError
            if not _is_upload(scope):
                receive = _keep_body(receive, request)
        # Starlette's patterns stop at a newline, and ignore one at a path's end: it would serve another path than the authorised one.
        scope["path"] = scope["path"].replace("\n", "\u2424")
        await self._starlette(scope, receive, send)

    async def _routing_error(self, request: StarletteRequest, error: Exception) -> Response:
        """Starlette's own 404 and 405, with its headers."""
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        methods = {word for word in headers.pop("Allow", "").split(", ") if word}  # only of one route
        for route in self._starlette.routes:
            if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
                methods |= route.methods or set()
        refused = self._not_found_error(request.scope, ", ".join(sorted(methods)))
        return error_response(refused, dialect_of(request.scope), headers)

    def _has_route(self, scope: Scope) -> bool:
        """Does the daemon answer this request itself?"""
        return any(route.matches(scope)[0] is Match.FULL for route in self._starlette.routes)

    def _not_found_error(self, scope: Scope, allowed: str = "") -> LlmuxError:
        method, path = scope["method"], scope["path"][:200]
        if (instead := _NOT_OFFERED.get((method, path))) is not None:
            return NotFoundError(f"{path} is not offered. {instead}")
        allowed = allowed or ", ".join(self._daemon.gateway.routes.methods(scope["path"], dialect_of(scope)))
        if allowed:
            return MethodNotAllowedError(f"{path} takes {allowed}, not {method}.", allowed=allowed)
        hint = " The client adds /v1 itself: leave it out of its base URL." if path.startswith("/v1/v1/") else ""
        return NotFoundError(f"There is nothing at {method} {path}, and no configured model serves it.{hint}")


def _is_upload(scope: Scope) -> bool:
    """May the body be too large to be buffered for a successor?"""
    return bool(scope["method"] == "POST" and scope["path"] == FILES)


def _keep_body(receive: Receive, request: Request) -> Receive:
    """Wrap `receive` to keep the body as well: a successor may also have to read it."""
    read = bytearray()

    async def kept() -> Message:
        message = await receive()
        read.extend(message.get("body", b""))
        request.waiting = RequestBuffer(data=read)
        return message

    return kept


def error_response(error: LlmuxError, dialect: Dialect, headers: Mapping[str, str] | None = None) -> Response:
    """The error response for a client of `dialect`; `headers` are added to the error's own."""
    body = error_body(error, dialect)
    response = Response(body, error.status)
    response.raw_headers = error_headers(error, body)
    response.headers.update(headers or {})
    return response


async def _render_error(request: StarletteRequest, error: Exception) -> Response:
    assert isinstance(error, LlmuxError)
    return error_response(error, dialect_of(request.scope))


async def _reraise(_request: StarletteRequest, error: Exception) -> Response:
    """Re-raise a bug, or the error of a response that can't be continued: the server protocol handles both."""
    raise error


def _with_common_headers(send: Send, request: Request) -> Send:
    """Wrap `send` to add the request's id, its duration and the other common headers to every response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            now = asyncio.get_running_loop().time()
            own = ((b"x-request-id", request.request_id), processing_ms(request.arrived_at, now), *request.extra)
            message["headers"] = [*message["headers"], *own]
        await send(message)

    return send_with_headers
