"""Request bodies: reading within limits, and the interface of every kind of body. `json_body` and `form` parse them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pydantic import JsonValue

from runtimes.base import Endpoint, TextReferences
from runtimes.model_config import Modality
from supervisor.catalog.models.rewrite import Fields, Rewrite
from supervisor.errors import InvalidRequestError, TooLargeError
from supervisor.gateway.disconnect import ClientDisconnectedError, Receive, Scope
from supervisor.gateway.filters.translation import AnswerTranslation, Translation
from supervisor.gateway.head import head_of
from supervisor.gateway.media.media_loading import NOTHING, Loading, Wanted
from supervisor.host.store.request_buffer import Bytes, RequestBuffer

__all__ = [
    "BUDGET",
    "CLIENT",
    "EXTENSION_FIELDS",
    "KEEP_ALIVE",
    "PRIORITY",
    "PRIVATE",
    "RESPONSE_FORMAT",
    "Body",
    "Bytes",
    "read_body",
    "refuse_other_charset",
]

PRIVATE: Final = "x_"
"""Prefix of private fields, which are for proxies and llmux. No worker gets them."""
PRIORITY: Final = "x_priority"
CLIENT: Final = "x_client_id"
BUDGET: Final = "x_timeout_s"
KEEP_ALIVE: Final = "x_keep_alive_s"
EXTENSION_FIELDS: Final = frozenset({PRIORITY, CLIENT, BUDGET, KEEP_ALIVE})
"""The private fields that llmux reads."""
RESPONSE_FORMAT: Final = "response_format"
"""A field of requests for pictures: should the answer have the pictures (`b64_json`) or their addresses (`url`)?"""
_UTF8: Final = re.compile(rb'[^;]*;\s*charset="?utf-?8"?[\s;]*', re.IGNORECASE)


class Body:
    """The interface of all request bodies. This class itself is the body of a request without one."""

    __slots__ = ("fields", "is_silent", "name", "stream")

    def __init__(self) -> None:
        self.name: str | None = None  # of the model; None: the body names none
        self.stream = False
        self.fields: Fields = {}  # of a JSON object, values unparsed, read-only; empty for every other body
        self.is_silent = True  # has the body no private fields?

    def nameless(self, scope: Scope) -> InvalidRequestError:
        """The error for a request that names no model."""
        if scope["method"] == "GET":
            return InvalidRequestError(
                f"Name the model: {scope['path']}?model=NAME; GET /v1/models lists the choice.", param="model"
            )
        return InvalidRequestError('The request body is empty; it must be a JSON object with a "model".')

    def rename(self, name: str) -> None:
        """If the body names a model, replace that name for the worker."""

    def extension(self, name: str) -> JsonValue:
        """The value of a field of `EXTENSION_FIELDS`; None if missing, null or empty. Raises InvalidRequestError."""
        return None

    @property
    def unknown_extensions(self) -> Sequence[str]:
        """The private fields that llmux doesn't know; no worker gets them."""
        return ()

    def raw(self, name: str) -> bytes | None:
        """A top-level field as JSON; None if there is none."""
        return None

    def translated(self, translation: Translation) -> tuple[Body, AnswerTranslation]:
        """The canonical request, and the translation of its answers. Raises InvalidRequestError if the body can't be translated."""
        raise InvalidRequestError("The request body is empty; it must be a JSON object.")

    def applied(self, rewrite: Rewrite, endpoint: Endpoint) -> Body:
        """The body after the rewrite for its model, for a later translation. Raises InvalidRequestError."""
        return self

    def take_permission(self) -> bool:
        """Does llmux's field `allow_remote` allow the request to leave this machine? Raises InvalidRequestError."""
        return False

    async def check(
        self,
        name: str,
        inputs: frozenset[Modality] | None,
        endpoint: Endpoint,
        loading: Loading = NOTHING,
        texts: TextReferences | None = None,
    ) -> Sequence[Wanted]:
        """Raises InvalidRequestError for content that no model, or not this one, may get, and for missing fields.

        `texts`: the marks of references within texts. Returns the references to be loaded before the worker gets the body.
        """
        return ()

    async def load(self, wanted: Sequence[Wanted], loading: Loading) -> None:
        """Load the references that `check` returned, and replace them by their content. Raises LlmuxError."""

    def prefix(self) -> int | None:
        """A fingerprint of the conversation's beginning, the same for all of its turns; None without a prompt."""
        return None

    async def rewritten(self, rewrite: Rewrite, endpoint: Endpoint) -> Bytes:
        """The body for a worker, after the rewrite. May be called for several workers. Raises InvalidRequestError."""
        return b""


async def read_body(scope: Scope, receive: Receive, limit: int, buffer: RequestBuffer | None = None) -> Bytes:
    """The whole body. The protocol disconnects a client that stalls.

    `buffer` counts the body's bytes as they arrive, and raises UnavailableError when the budget has no room for them. Raises
    TooLargeError as soon as more than `limit` bytes are announced or arrive (the server ends the connection soon after the
    answer), and ClientDisconnectedError.
    """
    announced = head_of(scope).content_length
    if announced is not None:
        if announced > limit:
            raise _too_large(limit)
        if buffer is not None:
            buffer.expect(announced)
    body, more = await _next_chunk(receive)
    if len(body) > limit:
        raise _too_large(limit)
    if not more:
        return body
    grown = bytearray(body)  # grows in place: joining chunks at the end would copy everything in one turn of the loop
    while more:
        body, more = await _next_chunk(receive)
        if len(grown) + len(body) > limit:
            raise _too_large(limit)
        if buffer is not None:
            buffer.grow(len(grown) + len(body))
        grown += body
    return grown


def refuse_other_charset(content_type: bytes) -> None:
    """Raises InvalidRequestError for a charset other than UTF-8.

    JSON is UTF-8: a worker that decodes by `charset=utf-7` would find other keys than llmux.
    """
    if b"charset" in content_type.lower() and _UTF8.fullmatch(content_type) is None:
        raise InvalidRequestError(
            "JSON is sent as UTF-8: leave the charset out of the Content-Type.", code="charset_not_supported"
        )


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    """The next chunk, and whether more chunks follow."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The request body is larger than {limit} bytes (limits.body_mib).")
