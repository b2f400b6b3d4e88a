"""The application: one gate for every request, then inference (pure ASGI) or everything else (Starlette routes).

There is one renderer for errors, here: whatever raises an `LlmuxError` before it has sent anything gets the same envelope.
"""

from __future__ import annotations

import secrets

from starlette.exceptions import HTTPException
from starlette.routing import Router

from supervisor.departure import ExchangeOverError, Message, Receive, Scope, Send
from supervisor.envelope import error_body, error_headers
from supervisor.errors import LlmuxError, MethodNotAllowedError, NotFoundError
from supervisor.http import admin, openai
from supervisor.http.context import Context
from supervisor.http.inference import Inference
from supervisor.io.upstream import Headers

MAX_REQUEST_ID = 128
_ID_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


class Application:
    """The daemon's ASGI application."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._inference = Inference(context.engine, context.catalog)
        self._router = Router([admin.health(context), *openai.routes(context), *admin.routes(context)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        assert scope["type"] == "http"
        request_id = request_id_of(scope["headers"])
        extra: Headers = []
        try:
            extra = self._context.gate.cors(scope)
            if scope["method"] == "OPTIONS" and extra:
                await _answer(send, 204, [(b"x-request-id", request_id), *extra], b"")
                return
            key = self._context.gate.admit(scope)
            if self._inference.serves(scope["method"], scope["path"]):
                await self._inference(scope, receive, send, request_id=request_id, key=key, extra=extra)
            else:
                await self._route(scope, receive, send, [(b"x-request-id", request_id), *extra])
        except ExchangeOverError:
            raise
        except LlmuxError as error:
            body = error_body(error)
            headers = [*error_headers(error, body), (b"x-request-id", request_id), *extra]
            await _answer(send, int(error.status), headers, body)

    async def _route(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        scope["app"] = self  # makes Starlette raise its 404 and 405 instead of answering them in plain text
        try:
            await self._router(scope, receive, send_with_headers)
        except HTTPException as error:
            if error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "another method")
                raise MethodNotAllowedError(f"{scope['path']} takes {allowed}, not {scope['method']}.") from error
            raise NotFoundError(f"There is nothing at {scope['method']} {scope['path'][:200]}.") from error


def request_id_of(headers: Headers) -> bytes:
    """The client's own `x-request-id` where it is short and harmless, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID and _ID_BYTES.issuperset(value):
            return value
    return b"req_" + secrets.token_hex(12).encode()


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
