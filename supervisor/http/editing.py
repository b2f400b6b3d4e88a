"""`/v1/admin/config`: reads, checks and changes the configuration's base file, for the scope `configure`. See `daemon.editing`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.catalog.document import MAX_BYTES
from supervisor.daemon.editing import Edit, Editor
from supervisor.errors import LlmuxError
from supervisor.gateway.body.parameters import struct_body
from supervisor.http.answer import answer
from supervisor.http.auth import CONFIG

MOST_BODY: Final = 6 * MAX_BYTES + 4096
"""JSON may take six characters for one of the text."""


class NoVersionError(LlmuxError):
    """A change that doesn't say which version of the file it was made for."""

    status = HTTPStatus.PRECONDITION_REQUIRED
    type = "invalid_request_error"
    code = "precondition_required"


def routes(editor: Editor) -> list[Route]:
    """What is below `/v1/admin/config`."""

    async def file(_request: Request) -> Response:
        found = await editor.file()
        return answer(found, found.etag)

    async def check(request: Request) -> Response:
        return answer(await editor.check(await struct_body(request, Edit, MOST_BODY)))

    async def save(request: Request) -> Response:
        etag = request.headers.get("if-match")
        if etag is None:
            raise NoVersionError(f"Send the ETag of GET {CONFIG} as If-Match, so that nobody's change gets lost.")
        saved = await editor.save(await struct_body(request, Edit, MOST_BODY), etag)
        return answer(saved, saved.etag)

    async def version(request: Request) -> Response:
        return answer(await editor.version(request.path_params["id"]))

    async def settings(request: Request) -> Response:
        found = await editor.settings(request.path_params["name"])
        return answer(found, found.etag)

    return [
        Route(CONFIG, file, methods=["GET"]),
        Route(CONFIG, save, methods=["PUT"]),
        Route(f"{CONFIG}/check", check, methods=["POST"]),
        Route(f"{CONFIG}/versions/{{id}}", version, methods=["GET"]),
        Route(f"{CONFIG}/models/{{name:path}}", settings, methods=["GET"]),
    ]
