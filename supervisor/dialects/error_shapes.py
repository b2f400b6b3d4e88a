"""The shapes that errors have on the wire, by the path they answer.

OpenAI's `{"error": {"message", "type", "param", "code"}}` everywhere; on Anthropic's paths Anthropic's
`{"type": "error", "error": {"type", "message", …}}` with its own types, and our other fields inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from supervisor.errors import AuthenticationError, LlmuxError, MethodNotAllowedError

_MAX_RETRY_AFTER_S = 120  # clients ignore more than that

_ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Do clients of this path read Anthropic's errors?"""
    return path.startswith(_ANTHROPIC_PATH) and path[len(_ANTHROPIC_PATH) :][:1] in {"", "/"}


def enveloped(fields: Mapping[str, object], status: int, path: str) -> bytes:
    """An error's fields in the envelope that clients of `path` read, as JSON without a line break."""
    if not is_anthropic(path):
        return msgspec.json.encode({"error": fields})
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {**fields, "type": kind}})


def error_body(error: LlmuxError, path: str) -> bytes:
    """The answer to a request to `path`. `detail` lines come along where there are any."""
    fields: dict[str, object] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if error.detail:
        fields["detail"] = error.detail
    return enveloped(fields, error.status, path)


def error_event(error: LlmuxError, path: str) -> bytes:
    """The error as an in-band server-sent event."""
    name = b"event: error\n" if is_anthropic(path) else b""
    return name + b"data: " + error_body(error, path) + b"\n\n"


def error_headers(error: LlmuxError, body: bytes) -> list[tuple[bytes, bytes]]:
    """Response headers for `error_body`: Retry-After (whole seconds, at most 120), Allow, WWW-Authenticate where due."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % min(_MAX_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s)))))
    if isinstance(error, MethodNotAllowedError) and error.allowed:
        headers.append((b"allow", error.allowed.encode("latin-1")))
    elif isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
