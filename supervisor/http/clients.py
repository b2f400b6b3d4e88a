"""The admin API's clients: what each did, whether it has to pause, and its profile."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.parameters import json_object

LONGEST_PAUSE_S = 86_400


def routes(daemon: Daemon) -> list[Route]:
    """What is below `/v1/admin/clients`."""

    async def every(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": daemon.clients.views()})

    async def one(request: Request) -> Response:
        return JSONResponse(daemon.clients.view(request.path_params["id"]))

    async def pause(request: Request) -> Response:
        client = request.path_params["id"]
        for_s = (await json_object(request, ("cooldown_s",))).get("cooldown_s")
        if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 <= for_s <= LONGEST_PAUSE_S:
            raise InvalidRequestError(
                f'The body must be {{"cooldown_s": SECONDS}}, from 0 to {LONGEST_PAUSE_S}; 0 ends a pause.',
                param="cooldown_s",
            )
        daemon.clients.pause(client, for_s)
        return JSONResponse(daemon.clients.view(client))

    async def forget(request: Request) -> Response:
        client = request.path_params["id"]
        daemon.clients.forget(client)
        return JSONResponse({"id": client, "forgotten": True})

    return [
        Route("/v1/admin/clients", every, methods=["GET"]),
        Route("/v1/admin/clients/{id:path}", one, methods=["GET"]),
        Route("/v1/admin/clients/{id:path}", pause, methods=["PUT"]),
        Route("/v1/admin/clients/{id:path}", forget, methods=["DELETE"]),
    ]
