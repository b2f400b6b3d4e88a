"""Refuses request lines and headers that llhttp accepts and llmux doesn't allow."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import httptools

from supervisor.errors import InvalidRequestError, LlmuxError, MethodNotAllowedError, TooLargeError

METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))

VERSIONS: Final = ("1.1", "1.0")

_UPGRADE_FIELDS: Final = frozenset((b"upgrade", b"connection", b"http2-settings"))


class HeadersTooLargeError(TooLargeError):
    """The request line and headers are larger than the limit."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    code = "headers_too_large"


def headers_too_large(limit: int) -> HeadersTooLargeError:
    return HeadersTooLargeError(f"The request's headers are larger than {limit} bytes (limits.header_kib).")


def refused_head(
    method: bytes, version: str, url: bytes, headers: list[tuple[bytes, bytes]], limit: int
) -> LlmuxError | None:
    """The error for an invalid request line or invalid headers, of more than `limit` bytes or ambiguous; None for a valid head."""
    hosts = framings = 0
    host = b""
    size = len(url)
    refusal: LlmuxError | None = None
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name == b"host":
            hosts += 1
            host = value
        elif name == b"content-length":
            framings += 1
        elif name == b"transfer-encoding":
            framings += 1
            if value.strip().lower() != b"chunked":
                refusal = InvalidRequestError("Transfer-Encoding other than chunked is not supported.")
    if size > limit:
        return headers_too_large(limit)
    if hosts > 1 or framings > 1:
        return InvalidRequestError("The request has several Host, Content-Length or Transfer-Encoding fields.")
    if version not in VERSIONS:
        return InvalidRequestError(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
    if hosts == 0 and version != "1.0":
        return InvalidRequestError("The request has no Host field, which HTTP/1.1 needs.")
    if method not in METHODS:
        allowed = b", ".join(sorted(METHODS)).decode()
        return MethodNotAllowedError("This method is not supported.", allowed=allowed)
    if url[:1] != b"/" and not url.lower().startswith(b"http://%b/" % host.strip().lower()):
        # A whole address takes precedence over the Host field, but only the Host field is checked.
        return InvalidRequestError("The request's address names another host than its Host field.")
    return refusal


def without_upgrade(method: bytes, version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head as bytes for the wire, without the offer of another protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % field for field in headers if field[0] not in _UPGRADE_FIELDS]
    return b"\r\n".join((*lines, b"\r\n"))


def split_url(url: bytes) -> tuple[bytes, bytes]:
    """Path and query, percent-encoded as on the wire. Raises httptools.HttpParserInvalidURLError."""
    if url[:1] == b"/" and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query
    parsed = httptools.parse_url(url)
    return parsed.path, parsed.query or b""
