"""Errors in Anthropic's shape: its types by HTTP status, in a body and in a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from supervisor.proxy.upstream_error import worker_error

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


class _Code(msgspec.Struct):
    code: int = 500


_code: Final = msgspec.json.Decoder(_Code).decode


def body(fields: Mapping[str, object], status: int) -> bytes:
    """`{"type": "error", "error": {"type", "message", …}}`. `fields` are kept, but for the type."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {**fields, "type": kind}})


def event(error: bytes) -> bytes:
    """A body as an event of a stream."""
    return b"event: error\ndata: " + error + b"\n\n"


def of_worker(error: msgspec.Raw) -> bytes:
    """The body for an error that a worker sent within its stream, in whatever shape."""
    try:
        status = _code(error).code  # llama.cpp and vLLM put the HTTP status there
    except (msgspec.MsgspecError, UnicodeDecodeError):
        status = 500
    told = worker_error(status if 400 <= status < 600 else 500, b"application/json", b'{"error":%b}' % bytes(error))
    return body({"message": told.message, "param": told.param, "code": told.code}, told.status)
