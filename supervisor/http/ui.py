"""The dashboard at `/ui/`: static files out of the package, open to all; everything they show comes through the API.

The policy in the headers lets the page run only its own files and talk only to this daemon; nothing is inline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

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


def routes(folder: Path = FOLDER) -> list[BaseRoute]:
    """`/ui/` and the files below it; `/` and `/ui` lead there.

    What a file's ETag stands for is its content: installed files may keep their size and date from one version to the next.
    """
    folder = folder.resolve()

    async def to_dashboard(_request: Request) -> Response:
        return Response(status_code=307, headers={"location": "ui/"})  # relative: right below any proxy's prefix, too

    async def file(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in {"GET", "HEAD"}:
            raise HTTPException(405, headers={"Allow": "GET, HEAD", **HEADERS})
        path = f"{folder}/{scope['path'].removeprefix('/ui/') or 'index.html'}"
        body = await asyncio.to_thread(_content, path)
        if body is None:
            raise HTTPException(404, headers=HEADERS)
        headers = {**HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"'}
        known = [tag.strip().removeprefix("W/") for tag in Headers(scope=scope).get("if-none-match", "").split(",")]
        if headers["etag"] in known or known == ["*"]:
            response = Response(status_code=304, headers=headers)
        else:
            response = Response(body, media_type=CONTENT_TYPES[Path(path).suffix], headers=headers)
        await response(scope, receive, send)

    return [
        Route("/", to_dashboard, methods=["GET"]),
        Route("/ui", to_dashboard, methods=["GET"]),
        Mount("/ui", file),
    ]


def _content(path: str) -> bytes | None:
    """A file of a known type, by the one name it has: none that a link, `..` or a doubled slash leads to. Blocks."""
    with contextlib.suppress(OSError, ValueError):
        if os.path.realpath(path, strict=True) == path and Path(path).suffix in CONTENT_TYPES:
            return Path(path).read_bytes()
    return None
