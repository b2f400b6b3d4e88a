"""`/v1/admin/sets`: which set is active, and the switch. See `daemon.sets`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.daemon.sets import Sets, Switch
from supervisor.gateway.body.parameters import struct_body
from supervisor.http.answer import answer


def routes(sets: Sets) -> list[Route]:
    """Both."""

    async def listed(_request: Request) -> Response:
        return answer(sets.listing())

    async def switch(request: Request) -> Response:
        await sets.switch((await struct_body(request, Switch)).active)
        return answer(sets.listing())

    return [
        Route("/v1/admin/sets", listed, methods=["GET"]),
        Route("/v1/admin/sets", switch, methods=["PUT"]),
    ]
