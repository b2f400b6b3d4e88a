"""The application: one gate for every request, then inference (pure ASGI) or everything else (a Starlette application).

There is one renderer for errors, here: whatever raises an `LlmuxError` before it has sent anything gets the same envelope.
A bug is left to the server protocol, which logs it, and answers it where nothing was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from supervisor.daemon import reload
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.feed import Feed
from supervisor.daemon.reload import Reloader
from supervisor.daemon.requests import RequestContext
from supervisor.dialects import llamacpp, openai_models, openai_speech
from supervisor.dialects.error_shapes import error_body, error_headers
from supervisor.errors import LlmuxError, MethodNotAllowedError, NotFoundError
from supervisor.http import admin, ui, watch
from supervisor.http.metrics import Metrics
from supervisor.http.request_id import STATE_KEY, request_id_of
from supervisor.proxy.disconnect import Message, Receive, Scope, Send
from supervisor.proxy.forward import processing_ms


class Application:
    """The daemon's ASGI application."""

    def __init__(self, daemon: Daemon, reloader: Reloader) -> None:
        self._daemon = daemon
        self.metrics = Metrics(daemon)
        feed = Feed(daemon)
        self._others = Starlette(
            routes=[
                admin.health(daemon),
                *openai_models.routes(daemon),
                *openai_speech.routes(daemon),
                *watch.routes(daemon, feed),
                *admin.routes(daemon),
                *reload.routes(reloader),
                *llamacpp.routes(daemon, feed),
                self.metrics.route(),
                *ui.routes(),
            ],
            exception_handlers={LlmuxError: _refused, HTTPException: self._not_routed, Exception: _left_to_the_server},
        )
        self._others.router.redirect_slashes = False  # a path is what it is: /health/ is not /health

    def close(self) -> None:
        """End what would go on for ever: the event streams."""
        self._daemon.hub.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        assert scope["type"] == "http"
        loop = asyncio.get_running_loop()
        context = RequestContext(request_id_of(scope["headers"]), loop.time())
        try:
            context.extra = self._daemon.auth.cors(scope)
            if scope["method"] == "OPTIONS" and context.extra:
                await Response(status_code=204)(scope, receive, _signed(send, context))
                return
            context.key = self._daemon.auth.authorize(scope)
            pipeline = self._daemon.pipeline
            if pipeline.serves(scope["method"], scope["path"]):
                await pipeline(scope, receive, send, context)
            else:
                await self._route(scope, receive, _signed(send, context))
        except LlmuxError as error:
            await error_response(error, scope["path"])(scope, receive, _signed(send, context))
        except Exception:
            scope.setdefault("state", {})[STATE_KEY] = context.request_id
            raise

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's patterns overlook one at a path's end: it would serve another path than the gate let in.
        if "\n" in scope["path"]:
            raise self._nothing_at(scope)
        await self._others(scope, receive, send)

    async def _not_routed(self, request: Request, error: Exception) -> Response:
        """Starlette's own 404 and 405, with the headers that it gives them."""
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        refused = self._nothing_at(request.scope, headers.pop("Allow", ""))
        return error_response(refused, request.scope["path"], headers)

    def _nothing_at(self, scope: Scope, allowed: str = "") -> LlmuxError:
        method, path = scope["method"], scope["path"][:200]
        allowed = allowed or ", ".join(self._daemon.pipeline.methods(scope["path"]))
        if allowed:
            return MethodNotAllowedError(f"{path} takes {allowed}, not {method}.", allowed=allowed)
        return NotFoundError(f"There is nothing at {method} {path}, and no configured model serves it.")


def error_response(error: LlmuxError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """What a request to `path` gets for this error; `headers` come on top of the error's own."""
    body = error_body(error, path)
    response = Response(body, error.status)
    response.raw_headers = error_headers(error, body)
    response.headers.update(headers or {})
    return response


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, LlmuxError)
    return error_response(error, request.scope["path"])


async def _left_to_the_server(_request: Request, error: Exception) -> Response:
    """A bug, or a client to whom nothing more can be told."""
    raise error


def _signed(send: Send, context: RequestContext) -> Send:
    """`send`, for responses that bear the request's id, how long it took, and what else belongs to every response."""

    async def signed(message: Message) -> None:
        if message["type"] == "http.response.start":
            now = asyncio.get_running_loop().time()
            own = ((b"x-request-id", context.request_id), processing_ms(context.arrived_at, now), *context.extra)
            message["headers"] = [*message["headers"], *own]
        await send(message)

    return signed
