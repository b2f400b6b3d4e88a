"""The one shape every error has on the wire: `{"error": {"message", "type", "param", "code"}}`, as OpenAI's clients read it."""

from __future__ import annotations

import math

import msgspec

from supervisor.errors import AuthenticationError, LlmuxError, MethodNotAllowedError

_MAX_RETRY_AFTER_S = 120  # clients ignore more than that


def error_body(error: LlmuxError) -> bytes:
    """The JSON of an error, without a line break. `detail` lines come along where there are any."""
    fields: dict[str, str | tuple[str, ...] | None] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if error.detail:
        fields["detail"] = error.detail
    return msgspec.json.encode({"error": fields})


def error_event(error: LlmuxError) -> bytes:
    """The error as an in-band server-sent event."""
    return b"data: " + error_body(error) + b"\n\n"


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
