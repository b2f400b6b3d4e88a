"""`GET /v1/images/files/{name}`: a picture that was asked for by address. Whoever knows the address gets it, without a key."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.errors import NotFoundError
from supervisor.proxy.picture_links import PREFIX

_HEADERS: Final = {"cache-control": "private, max-age=3600", "x-content-type-options": "nosniff"}


def routes(daemon: Daemon) -> list[Route]:
    """The one route."""

    async def file(request: Request) -> Response:
        path = await asyncio.to_thread(daemon.pictures.find, request.path_params["name"])
        if path is None:
            raise NotFoundError("There is no such picture, or no longer.", code="picture_not_found")
        return FileResponse(path, headers=_HEADERS, media_type=f"image/{path.suffix[1:]}")

    return [Route(f"{PREFIX}{{name}}", file, methods=["GET"])]
