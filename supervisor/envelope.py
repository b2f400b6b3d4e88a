"""The one shape every error has on the wire: `{"error": {"message", "type", "param", "code"}}`, as OpenAI's clients read it."""

from __future__ import annotations

import math

import msgspec

from supervisor.errors import LlmuxError

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
    """Response headers for `error_body`, with Retry-After (whole seconds, at most 120) where the error has one."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % min(_MAX_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s)))))
    return headers
