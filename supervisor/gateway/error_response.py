"""Error responses: an `LlmuxError` as the body, the headers, or the in-band event that a client of a dialect reads."""

from __future__ import annotations

import math

from supervisor.errors import MAX_RETRY_AFTER_S, AuthenticationError, LlmuxError, MethodNotAllowedError
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.filters.filters import EVENTS, LINES


def error_body(error: LlmuxError, dialect: Dialect) -> bytes:
    """The response's body, with the `detail` lines if the error has any."""
    fields: dict[str, object] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.figures,
    }
    if error.detail:
        fields["detail"] = error.detail
    return dialect.error(fields, error.status)


def error_event(error: LlmuxError, dialect: Dialect, sent: bytes = b"", content_type: bytes = EVENTS) -> bytes:
    """The error as the last event, or line, of a stream of this type. `sent` is the end of the bytes sent so far."""
    body = error_body(error, dialect)
    if content_type.startswith(LINES):
        return (b"\n" if sent and not sent.endswith(b"\n") else b"") + body + b"\n"
    return dialect.error_event(body, sent)


def error_headers(error: LlmuxError, body: bytes) -> list[tuple[bytes, bytes]]:
    """Response headers for `body`: Retry-After (whole seconds, at most 120), Allow, WWW-Authenticate where due.

    `x-should-retry: false` keeps OpenAI's and Anthropic's SDKs from retrying a request that can't succeed.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % min(MAX_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s)))))
    if error.lasts:
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, MethodNotAllowedError) and error.allowed:
        headers.append((b"allow", error.allowed.encode("latin-1")))
    elif isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
