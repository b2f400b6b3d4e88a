"""Large answers of our own: sent as their clients read, and kept on disk meanwhile, as bodies are that wait."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from supervisor.errors import UnavailableError
from supervisor.io.held_body import BodyBudget, HeldBody


class JsonInSlices(Response):
    """A response of JSON that is encoded already; `bodies` counts it."""

    def __init__(self, content: bytes, bodies: BodyBudget) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(len(content))
        self._content = content
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises UnavailableError where there is no room for it, or it can't be read back."""
        held = HeldBody(self._bodies)
        held.expect(len(self._content))
        held.keep(self._content)
        self._content = b""
        held.wait()  # for the client
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at = 0
            while at < held.size:
                piece = await held.slice(at)
                if not piece:
                    raise UnavailableError("The answer on disk is shorter than it was.")
                at += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": at < held.size})
                await asyncio.sleep(0)
        finally:
            held.release()
