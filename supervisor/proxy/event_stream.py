"""Answers that go on for ever, as server-sent events: a comment when nothing comes for a while, an end when the client left.

`pieces` gives what to send; an empty piece is nothing new, which becomes a comment so that proxies keep the connection. The
client's leaving cancels whatever `pieces` waits for, also while nothing is being written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from supervisor.errors import MethodNotAllowedError
from supervisor.proxy.disconnect import CancelOnDisconnect

KEEPALIVE_S: Final = 10.0
COMMENT: Final = b": keepalive\n\n"


class EventStream(Response):
    """A response made of the pieces of an asynchronous generator, each sent when it comes. `held` is given back at its end."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], held: AbstractContextManager[object]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._pieces = pieces
        self._held = held  # not the generator's own affair: one that was never begun would never give it back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the generator ends or the client leaves (ClientDisconnectedError). Raises MethodNotAllowedError for HEAD."""
        with self._held:
            if scope["method"] == "HEAD":  # it would never end
                raise MethodNotAllowedError("A stream of events has no head to look at; use GET.", allowed="GET")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._pieces) as pieces:
                with CancelOnDisconnect(scope):
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece or COMMENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
