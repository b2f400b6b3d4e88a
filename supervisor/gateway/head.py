"""A request's headers, read in one pass: no other part of llmux searches them again."""

from __future__ import annotations

from typing import Any, Final

from supervisor.errors import InvalidRequestError
from supervisor.gateway.disconnect import Scope
from supervisor.host.upstream.upstream import HOP_BY_HOP, Headers

PRIORITY: Final = b"x-priority"
TENANT: Final = b"x-tenant-id"
TIMEOUT: Final = b"x-timeout"
ALLOW_REMOTE: Final = b"x-allow-remote"
LOAD_FEEDBACK: Final = b"x-llmux-load-feedback"
TRACE: Final = b"traceparent"
CACHE_MODE: Final = b"x-cache-mode"
CACHE_TAG: Final = b"x-cache-tag"
CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key"))
STATE_KEY: Final = "head"  # in the ASGI scope's state

_HOST, _LENGTH, _TYPE, _SECRET, _ORIGIN, _SITE, _ENCODING, _CONNECTION, _ID, _OWN, _PASSED_ON, _DROPPED = range(12)
_KINDS: Final = {
    # Hop-by-hop fields are for llmux, which writes its own to the worker; the server has answered Expect. Without Accept-Encoding
    # workers don't compress: the answer comes over loopback, and llmux reads it on its way.
    **dict.fromkeys((*HOP_BY_HOP, b"accept-encoding", b"cookie", b"expect"), _DROPPED),
    **dict.fromkeys(CREDENTIALS, _SECRET),
    b"host": _HOST,
    b"content-length": _LENGTH,
    b"content-type": _TYPE,
    b"content-encoding": _ENCODING,
    b"connection": _CONNECTION,
    b"x-request-id": _ID,
    b"origin": _ORIGIN,
    b"sec-fetch-site": _SITE,
    **dict.fromkeys((PRIORITY, TENANT, TIMEOUT, ALLOW_REMOTE, LOAD_FEEDBACK), _OWN),
    **dict.fromkeys((TRACE, CACHE_MODE, CACHE_TAG), _PASSED_ON),  # workers get them as well
}
_USUAL: Final = frozenset((b"keep-alive", b"Keep-Alive", b"close"))


class RequestHead:
    """A request's headers. Names are lowercase; a missing header is None, or an empty list."""

    __slots__ = (
        "content_length",
        "content_type",
        "for_worker",
        "host",
        "is_compressed",
        "origin",
        "own",
        "request_id",
        "secrets",
        "site",
        "types",
    )

    def __init__(self, headers: Headers) -> None:
        self.host: bytes | None = None
        self.origin: bytes | None = None
        self.site: bytes | None = None
        self.request_id: bytes | None = None
        self.content_length: int | None = None
        self.content_type = b""
        self.types = 0  # the number of Content-Type fields
        self.is_compressed = False
        self.secrets: Headers = []  # fields that may have a key
        self.own: Headers = []  # fields for llmux
        self.for_worker: Headers = []  # fields for the worker: end-to-end, without credentials
        kept = self.for_worker
        named: bytes | None = None
        for item in headers:
            kind = _KINDS.get(item[0])
            if kind is None:
                kept.append(item)
                continue
            value = item[1]
            if kind == _HOST:
                self.host = _join_values(self.host, value)
            elif kind == _TYPE:
                self.content_type = value
                self.types += 1
                kept.append(item)
            elif kind == _LENGTH:
                self.content_length = int(value)
            elif kind == _SECRET:
                self.secrets.append(item)
            elif kind == _CONNECTION:
                named = named if value in _USUAL else _join_values(named, value)
            elif kind == _ID:
                self.request_id = value
            elif kind == _OWN:
                self.own.append(item)
            elif kind != _DROPPED:
                kept.append(item)
                if kind == _PASSED_ON:
                    self.own.append(item)
                elif kind == _ORIGIN:
                    self.origin = _join_values(self.origin, value)
                elif kind == _SITE:
                    self.site = value
                else:
                    self.is_compressed |= value.strip().lower() not in (b"", b"identity")
        if named is not None:
            hops = {token.strip().lower() for token in named.split(b",")}
            self.for_worker = [item for item in kept if item[0] not in hops]

    def worker_headers(self, credentials: frozenset[bytes] = CREDENTIALS) -> Headers:
        """The worker's headers. `credentials`, which may carry keys, are left out. Don't change the list."""
        if credentials <= CREDENTIALS:
            return self.for_worker
        return [item for item in self.for_worker if item[0] not in credentials]

    def keys(self, credentials: frozenset[bytes] = CREDENTIALS) -> Headers:
        """The fields that may carry the client's key, if `credentials` are the headers for keys."""
        if credentials == CREDENTIALS:
            return self.secrets
        return [item for item in (*self.secrets, *self.for_worker) if item[0] in credentials]

    def media_type(self) -> bytes:
        """The Content-Type; empty without one. Raises InvalidRequestError if a worker could understand another type."""
        if self.types > 1:
            raise InvalidRequestError("The request has several Content-Type fields.")
        if self.is_compressed:
            raise InvalidRequestError("The request body is compressed; send it as it is, without Content-Encoding.")
        return self.content_type


def head_of(scope: Scope) -> RequestHead:
    """The head of a request. The server protocol has parsed the headers; for other scopes they are parsed here."""
    state: dict[str, Any] = scope.setdefault("state", {})
    head: RequestHead | None = state.get(STATE_KEY)
    if head is None:
        head = state[STATE_KEY] = RequestHead(scope["headers"])
    return head


def _join_values(before: bytes | None, value: bytes) -> bytes:
    """Join several fields of one name: a header that is allowed only once becomes invalid for every reader."""
    return value if before is None else before + b"," + value
