"""Addresses of pictures in answers, instead of the pictures. The daemon keeps the pictures and serves them at these addresses.

Workers make no addresses. A worker answers a request for addresses with the pictures, and marks the answer
(`runtimes.shared.pictures`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any, Final

import msgspec

from runtimes.shared.pictures import HEADER
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.body.body import RESPONSE_FORMAT
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.filters import Filter, Head, Use
from supervisor.host.store.picture_store import PictureStore
from supervisor.host.store.request_buffer import Bytes

PREFIX: Final = "/v1/images/files/"
_PATHS: Final = ("/images/generations", "/images/edits", "/images/variations")
PATHS: Final = frozenset({*_PATHS, *(f"/v1{path}" for path in _PATHS)})
"""Paths whose answers may have pictures."""
_HEADER: Final = HEADER.encode()
_KINDS: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}  # by a file's first bytes


class PictureLinks(Filter):
    """Keeps the pictures of one request's answer. `public_url`: see `server` in the configuration."""

    def __init__(self, store: PictureStore, scope: Scope, public_url: str | None) -> None:
        self._store = store
        self._base = base_url(scope) if public_url is None else public_url.rstrip("/")

    def head(self, head: Head) -> Use:
        """See Filter. Raises InvalidRequestError if no pictures are kept."""
        if (_HEADER, b"url") not in head.headers:
            return Use.NONE
        if not self._store.is_on:
            raise _not_kept_error()
        head.changes_body(b"application/json")
        head.headers.remove((_HEADER, b"url"))
        return Use.WHOLE

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """See Filter."""
        linked = await asyncio.to_thread(self._with_links, body)
        asyncio.get_running_loop().call_later(self._store.keep_s + 1, self._store.expire)
        return linked

    def _with_links(self, body: Bytes) -> bytes:
        """The answer with addresses. Blocks. Raises LlmuxError."""
        try:
            answer: dict[str, Any] = msgspec.json.decode(body)
            items = answer["data"]
            pictures = [base64.b64decode(item.pop("b64_json"), validate=True) for item in items]
            kinds = [next(kind for start, kind in _KINDS.items() if data.startswith(start)) for data in pictures]
        except (msgspec.DecodeError, binascii.Error, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise UpstreamError("The worker's answer has no pictures.") from error
        for item, name in zip(items, self._store.keep([*zip(pictures, kinds, strict=True)]), strict=True):
            item["url"] = f"{self._base}{PREFIX}{name}"
        return msgspec.json.encode(answer)


def refuse_links(response_format: bytes | None) -> None:
    """Raises InvalidRequestError for a request for addresses, before a picture is made: this daemon keeps no pictures."""
    if response_format == b'"url"':
        raise _not_kept_error()


def _not_kept_error() -> InvalidRequestError:
    return InvalidRequestError(
        "No pictures are kept here (limits.pictures_mib); ask for b64_json.", param=RESPONSE_FORMAT
    )


def base_url(scope: Scope) -> str:
    """The address by which a request's client reaches this daemon; empty if unknown, as in jobs."""
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return f"{scope.get('scheme', 'http')}://{host.decode('latin-1')}" if host else ""
