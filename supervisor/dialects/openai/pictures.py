"""`GET /v1/images/files/{name}`: a picture that was asked for by address. Whoever knows the address gets it, without a key."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.errors import NotFoundError
from supervisor.gateway.filters.picture_links import PREFIX


def routes(daemon: Daemon) -> list[Route]:
    """The one route."""

    async def file(request: Request) -> Response:
        kept = await asyncio.to_thread(daemon.pictures.find, request.path_params["name"])
        if kept is None:
            raise NotFoundError("There is no such picture, or no longer.", code="picture_not_found")
        headers = {"cache-control": f"private, max-age={int(kept.left_s)}", "x-content-type-options": "nosniff"}
        return FileResponse(kept.path, headers=headers, media_type=f"image/{kept.path.suffix[1:]}")

    return [Route(f"{PREFIX}{{name}}", file, methods=["GET"])]
