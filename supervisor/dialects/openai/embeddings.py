"""Embeddings with `dimensions` of a worker that gives all it has: the first numbers, made one long again."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.openai.whole import Completed
from supervisor.errors import InvalidRequestError

_size: Final = msgspec.json.Decoder(int).decode


def cut(vector: Sequence[float], size: int) -> Sequence[float]:
    """`size` numbers of it, whatever its model was trained for, with the length 1. Raises InvalidRequestError if it has fewer."""
    if len(vector) < size:
        raise InvalidRequestError(f'"dimensions" is {size}; this model has {len(vector)}.', param="dimensions")
    if len(vector) == size:
        return vector
    kept = vector[:size]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]


class Embeddings:
    """See Translation."""

    path = "/v1/embeddings"

    def request(self, fields: Fields) -> tuple[Fields, Completed]:
        """See Translation."""
        try:
            size = _size(fields["dimensions"])
        except msgspec.MsgspecError:
            size = 0
        if size < 1:
            raise InvalidRequestError('"dimensions" must be a whole number above 0.', param="dimensions")
        is_packed = bytes(fields.get("encoding_format", b"")) == b'"base64"'

        def complete(answer: dict[str, Any]) -> None:
            for row in answer["data"]:
                kept = cut(row["embedding"], size)
                row["embedding"] = base64.b64encode(array("f", kept)).decode() if is_packed else kept

        kept = {name: raw for name, raw in fields.items() if name != "dimensions"}
        return kept | {"encoding_format": msgspec.Raw(b'"float"')}, Completed(complete, "list of embeddings")
