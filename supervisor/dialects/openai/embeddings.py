"""Embeddings with `dimensions` of a worker that gives all it has: the first numbers, made one long again."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.proxy.translation import CANONICAL, StreamTranslation

_encode: Final = msgspec.json.Encoder().encode
_size: Final = msgspec.json.Decoder(int).decode
_object: Final = msgspec.json.Decoder(dict[str, Any]).decode


def cut(vector: Sequence[float], size: int) -> Sequence[float]:
    """At most `size` numbers of it, whatever its model was trained for, with the length 1."""
    if len(vector) <= size:
        return vector
    kept = vector[:size]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]


class Embeddings:
    """See Translation."""

    path = "/v1/embeddings"

    def request(self, fields: Fields) -> tuple[Fields, Vectors]:
        """See Translation."""
        try:
            size = _size(fields["dimensions"])
        except msgspec.MsgspecError:
            size = 0
        if size < 1:
            raise InvalidRequestError('"dimensions" must be a whole number above 0.', param="dimensions")
        is_packed = bytes(fields.get("encoding_format", b"")) == b'"base64"'
        kept = {name: raw for name, raw in fields.items() if name != "dimensions"}
        return kept | {"encoding_format": msgspec.Raw(b'"float"')}, Vectors(size, is_packed)


@dataclass(frozen=True, slots=True)
class Vectors:
    """See AnswerTranslation."""

    size: int
    is_packed: bool
    ignored: Sequence[str] = ()
    names: ClassVar[Mapping[str, str]] = CANONICAL
    content_type: bytes = b"application/json"
    stream_content_type: bytes = b"text/event-stream"

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        try:
            found = _object(body)
            for row in found["data"]:
                kept = cut(row["embedding"], self.size)
                packed = struct.pack(f"<{len(kept)}f", *kept) if self.is_packed else b""
                row["embedding"] = base64.b64encode(packed).decode() if self.is_packed else kept
        except (
            msgspec.MsgspecError,
            LookupError,
            TypeError,
            struct.error,
            RecursionError,
            UnicodeDecodeError,
        ) as error:
            raise UpstreamError("The worker's answer is no list of embeddings.") from error
        return _encode(found)

    def stream(self) -> StreamTranslation:
        """Embeddings have none. Raises UpstreamError."""
        raise UpstreamError("The worker's answer is a stream, not a list of embeddings.")
