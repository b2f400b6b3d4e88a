"""The dashboard at `/ui/`: static files out of the package, open to all; everything they show comes through the API.

The files are read once, so a request is a look-up by exact name and no path can lead out of the folder. The policy in the
headers lets the page run only its own files and talk only to this daemon; nothing is inline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER: Final = Path(__file__).with_name("ui")
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


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    content_type: str
    etag: str


def assets(folder: Path = FOLDER) -> dict[str, Asset]:
    """Every servable file by its path below `folder`; `""` is the page itself. Blocks on reading them."""
    found = {path.relative_to(folder).as_posix(): _asset(path) for path in _files(folder)}
    found[""] = found["index.html"]
    return found


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in CONTENT_TYPES)


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, CONTENT_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')


def routes() -> list[Route]:
    """`/ui/` and what belongs to it; `/` and `/ui` lead there."""
    table = assets()

    async def to_dashboard(_request: Request) -> Response:
        return Response(status_code=307, headers={"location": "ui/"})  # relative: right below any proxy's prefix, too

    async def asset(request: Request) -> Response:
        found = table.get(request.path_params["path"])
        if found is None:
            raise HTTPException(404)
        headers = {**HEADERS, "etag": found.etag}
        if found.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(found.body, media_type=found.content_type, headers=headers)

    return [
        Route("/", to_dashboard, methods=["GET"]),
        Route("/ui", to_dashboard, methods=["GET"]),
        Route("/ui/{path:path}", asset, methods=["GET"]),
    ]
