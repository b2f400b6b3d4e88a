"""`/v1/admin/config/additions`: adds models to the configuration, for the scope `configure`. See `daemon.additions`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.daemon.additions import Additions, Wanted
from supervisor.daemon.editing import Editor, ReadOnlyError
from supervisor.gateway.body.parameters import struct_body
from supervisor.gateway.disconnect import CancelOnDisconnect
from supervisor.http.answer import answer
from supervisor.http.auth import CONFIG

PATH: Final = f"{CONFIG}/additions"


def routes(editor: Editor, additions: Additions) -> list[Route]:
    """What there is to add, what is being added, and its end."""

    async def look(request: Request) -> Response:
        wanted = await struct_body(request, Wanted)
        with CancelOnDisconnect(request.scope):
            return answer(await additions.look(wanted))

    async def begin(request: Request) -> Response:
        wanted = await struct_body(request, Wanted)
        if (locked := await editor.locked()) is not None:
            found = await additions.look(wanted)
            raise ReadOnlyError(
                f"The configuration can't be changed here: {locked}. Enter this where it comes from, then fetch the files: "
                f"llmux pull {found.names[0]}",
                detail=tuple(found.entry.splitlines()),
            )
        return answer(additions.begin(wanted), status=HTTPStatus.ACCEPTED)

    async def listed(_request: Request) -> Response:
        return answer(additions.listing())

    async def one(request: Request) -> Response:
        return answer(additions.find(request.path_params["id"]))

    async def cancel(request: Request) -> Response:
        return answer(await additions.cancel(request.path_params["id"]))

    return [
        Route(f"{PATH}/look", look, methods=["POST"]),
        Route(PATH, begin, methods=["POST"]),
        Route(PATH, listed, methods=["GET"]),
        Route(f"{PATH}/{{id}}", one, methods=["GET"]),
        Route(f"{PATH}/{{id}}", cancel, methods=["DELETE"]),
    ]
