"""Errors in Anthropic's shape: its types by HTTP status, in a body and in a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def body(fields: Mapping[str, object], status: int) -> bytes:
    """`{"type": "error", "error": {"type", "message", …}}`. `fields` are kept, but for the type."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {**fields, "type": kind}})


def event(error: bytes) -> bytes:
    """A body as an event of a stream."""
    return b"event: error\ndata: " + error + b"\n\n"
