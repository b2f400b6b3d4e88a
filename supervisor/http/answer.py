"""A struct as a response."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.responses import Response


def answer(value: object, etag: str | None = None, status: int = HTTPStatus.OK) -> Response:
    """As JSON."""
    headers = {} if etag is None else {"etag": etag}
    return Response(msgspec.json.encode(value), status, headers, "application/json")
