"""The dashboard at `/ui/`: the package's static files, open to all; all data in it comes through the API.

The policy in the headers allows the page to run only its own files and to call only this daemon; nothing is inline.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER: Final = Path(__file__).resolve().with_name("ui")  # resolved: installers may link to every file of a package
POLICY: Final = {
    "default-src": "'self'",
    "img-src": "'self' data: blob:",  # pictures pasted into the playground and made by it
    "media-src": "'self' blob:",  # speech
    "object-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS: Final = {
    "content-security-policy": "; ".join(f"{kind} {sources}" for kind, sources in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # ask each time; the answer is mostly 304
}
CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class Dashboard(StaticFiles):
    """A folder's files of the types above, each by one name only (and the page by `/ui/`). A 404 gets the same headers.

    An ETag is made from a file's content: installed files may keep size and date from one version to the next.
    """

    def get_path(self, scope: Scope) -> str:
        """The path below the folder, not normalised; `""` is the page itself."""
        path: str = scope["path"]
        return path.removeprefix(scope["root_path"] + "/") or "index.html"

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """See StaticFiles. Blocks, and finds no file outside the folder."""
        if f"/{path}" != os.path.normpath(f"/{path}"):  # a second name for a file
            return "", None
        full_path, found = super().lookup_path(path)
        return (full_path, found) if Path(full_path).suffix in CONTENT_TYPES else ("", None)

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """A response with the file's path, for `get_response`."""
        return FileResponse(full_path)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 304 if it hasn't changed. Raises HTTPException."""
        try:
            found = await super().get_response(path, scope)
        except HTTPException as error:
            raise HTTPException(error.status_code, headers={**(error.headers or {}), **HEADERS}) from error
        assert isinstance(found, FileResponse)
        file = Path(found.path)
        body = await asyncio.to_thread(file.read_bytes)
        headers = {**HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"'}
        whole = Response(body, media_type=CONTENT_TYPES[file.suffix], headers=headers)
        if self.is_not_modified(whole.headers, Headers(scope=scope)):
            return Response(status_code=304, headers=headers)
        return whole


def routes(folder: Path = FOLDER) -> list[BaseRoute]:
    """The routes of `/ui/` and its files; `/` and `/ui` redirect there."""

    async def to_dashboard(_request: Request) -> Response:
        return Response(status_code=307, headers={"location": "ui/"})  # relative: works below a proxy's prefix, too

    return [
        Route("/", to_dashboard, methods=["GET"]),
        Route("/ui", to_dashboard, methods=["GET"]),
        Mount("/ui", Dashboard(directory=folder)),
    ]
