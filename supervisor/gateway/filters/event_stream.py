"""Endless server-sent event streams: a comment after some silence, an end when the client disconnects.

`pieces` yields the bytes to send. An empty piece means that there is nothing new: it becomes a comment, so that proxies keep the
connection. A disconnect cancels the current wait of `pieces`, also while nothing is written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from supervisor.errors import MethodNotAllowedError
from supervisor.gateway.disconnect import CancelOnDisconnect

KEEPALIVE_S: Final = 10.0
COMMENT: Final = b": keepalive\n\n"


class EventStream(Response):
    """A response that sends the pieces of an asynchronous generator as they come. `resource` is released at the end."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], resource: AbstractContextManager[object]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._pieces = pieces
        self._resource = resource  # the generator can't release it: a generator that never began runs no code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the generator ends or the client disconnects (ClientDisconnectedError). Raises MethodNotAllowedError for HEAD."""
        with self._resource:
            if scope["method"] == "HEAD":  # would never end
                raise MethodNotAllowedError("A stream of events has no head to look at; use GET.", allowed="GET")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._pieces) as pieces:
                with CancelOnDisconnect(scope):
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece or COMMENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
