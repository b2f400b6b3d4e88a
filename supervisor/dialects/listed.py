"""Long answers. They are encoded and sent in slices, so that other tasks run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from supervisor.daemon.slices import slices


class Pieces(Response):
    """Sends its body in pieces. Other tasks run after each piece."""

    def __init__(self, pieces: Sequence[bytes], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})


async def listed(items: Iterable[object], name: str = "data", **others: object) -> Response:
    """A JSON object of `others` and, last, the items as a list under `name`. See `slices` for the requirements on `items`."""
    encode = msgspec.json.Encoder().encode
    pieces = [encode({**others, name: []}).removesuffix(b"]}")]
    async for made in slices(map(encode, items)):
        pieces += b"," if len(pieces) > 1 else b"", b",".join(made)
    return Pieces([*pieces, b"]}"], "application/json")
