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
from supervisor.daemon.daemon import Context
from supervisor.daemon.feed import Feed
from supervisor.daemon.reload import Reloader
from supervisor.daemon.requests import Call
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

    def __init__(self, context: Context, reloader: Reloader) -> None:
        self._context = context
        self.metrics = Metrics(context)
        feed = Feed(context)
        self._others = Starlette(
            routes=[
                admin.health(context),
                *openai_models.routes(context),
                *openai_speech.routes(context),
                *watch.routes(context, feed),
                *admin.routes(context),
                *reload.routes(reloader),
                *llamacpp.routes(context, feed),
                self.metrics.route(),
                *ui.routes(),
            ],
            exception_handlers={LlmuxError: _refused, HTTPException: self._not_routed, Exception: _left_to_the_server},
        )
        self._others.router.redirect_slashes = False  # a path is what it is: /health/ is not /health

    def close(self) -> None:
        """End what would go on for ever: the event streams."""
        self._context.hub.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        assert scope["type"] == "http"
        loop = asyncio.get_running_loop()
        call = Call(request_id_of(scope["headers"]), loop.time())
        try:
            call.extra = self._context.gate.cors(scope)
            if scope["method"] == "OPTIONS" and call.extra:
                await Response(status_code=204)(scope, receive, _signed(send, call))
                return
            call.key = self._context.gate.admit(scope)
            inference = self._context.inference
            if inference.serves(scope["method"], scope["path"]):
                await inference(scope, receive, send, call)
            else:
                await self._route(scope, receive, _signed(send, call))
        except LlmuxError as error:
            await error_response(error, scope["path"])(scope, receive, _signed(send, call))
        except Exception:
            scope.setdefault("state", {})[STATE_KEY] = call.request_id
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
        allowed = allowed or ", ".join(self._context.inference.methods(scope["path"]))
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


def _signed(send: Send, call: Call) -> Send:
    """`send`, for responses that bear the request's id, how long it took, and what else belongs to every response."""

    async def signed(message: Message) -> None:
        if message["type"] == "http.response.start":
            now = asyncio.get_running_loop().time()
            own = ((b"x-request-id", call.request_id), processing_ms(call.arrived_at, now), *call.extra)
            message["headers"] = [*message["headers"], *own]
        await send(message)

    return signed
