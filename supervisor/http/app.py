"""The application: one gate for every request, then inference (pure ASGI) or everything else (Starlette routes).

There is one renderer for errors, here: whatever raises an `LlmuxError` before it has sent anything gets the same envelope.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.routing import Router

from supervisor.departure import ExchangeOverError, Message, Receive, Scope, Send
from supervisor.envelope import error_body, error_headers
from supervisor.errors import LlmuxError, MethodNotAllowedError, NotFoundError
from supervisor.http import admin, llamacpp, openai, reload, speech, ui, watch
from supervisor.http.context import Context
from supervisor.http.feed import Feed
from supervisor.http.metrics import Metrics
from supervisor.http.reload import Reloader
from supervisor.http.request_id import request_id_of
from supervisor.http.requests import Call
from supervisor.io.upstream import Headers
from supervisor.proxy import processing_ms


class Application:
    """The daemon's ASGI application."""

    def __init__(self, context: Context, reloader: Reloader) -> None:
        self._context = context
        self.metrics = Metrics(context)
        feed = Feed(context)
        self._router = Router(
            [
                admin.health(context),
                *openai.routes(context),
                *speech.routes(context),
                *watch.routes(context, feed),
                *admin.routes(context),
                *reload.routes(reloader),
                *llamacpp.routes(context, feed),
                self.metrics.route(),
                *ui.routes(),
            ],
            redirect_slashes=False,  # a path is what it is: /health/ is not /health
        )

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
                await _answer(send, 204, _headers(call, loop.time()), b"")
                return
            call.key = self._context.gate.admit(scope)
            inference = self._context.inference
            if inference.serves(scope["method"], scope["path"]):
                await inference(scope, receive, send, call)
            else:
                await self._route(scope, receive, send, call)
        except ExchangeOverError:
            raise
        except LlmuxError as error:
            body = error_body(error, scope["path"])
            await _answer(send, error.status, [*error_headers(error, body), *_headers(call, loop.time())], body)

    async def _route(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                now = asyncio.get_running_loop().time()
                message["headers"] = [*message["headers"], *_headers(call, now)]
            await send(message)

        scope["app"] = self  # makes Starlette raise its 404 and 405 instead of answering them in plain text
        method, path = scope["method"], scope["path"][:200]
        try:
            await self._router(scope, receive, send_with_headers)
        except HTTPException as error:
            if error.status_code == 405:
                raise _not_allowed(method, path, (error.headers or {}).get("Allow", "")) from error
            if others := self._context.inference.methods(scope["path"]):
                raise _not_allowed(method, path, ", ".join(others)) from error
            raise NotFoundError(f"There is nothing at {method} {path}, and no configured model serves it.") from error


def _not_allowed(method: str, path: str, allowed: str) -> MethodNotAllowedError:
    return MethodNotAllowedError(f"{path} takes {allowed}, not {method}.", allowed=allowed)


def _headers(call: Call, now: float) -> Headers:
    return [(b"x-request-id", call.request_id), processing_ms(call.arrived_at, now), *call.extra]


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
