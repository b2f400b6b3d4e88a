"""Completes the whole answers of workers that ignore some fields of OpenAI's requests.

- `dimensions` of embeddings: the worker returns the whole vector; llmux scales its first numbers to the length 1.
- `return_documents` of a ranking: each result gets its document.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.filters.translation import SAME_NAMES, StreamTranslation

_encode: Final = msgspec.json.Encoder().encode
_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_size: Final = msgspec.json.Decoder(int).decode
_documents: Final = msgspec.json.Decoder(list[str | dict[str, Any]]).decode


@dataclass(frozen=True, slots=True)
class Completed:
    """The `AnswerTranslation` of a whole answer. `complete` changes the decoded answer in place.

    `complete` may raise any error if the worker's answer is not a `noun`.
    """

    complete: Callable[[dict[str, Any]], None]
    noun: str
    ignored: Sequence[str] = ()
    names: ClassVar[Mapping[str, str]] = SAME_NAMES
    content_type: bytes = b"application/json"
    stream_content_type: bytes = b"text/event-stream"

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        try:
            found = _object(body)
            self.complete(found)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise UpstreamError(f"The worker's answer is no {self.noun}.") from error
        return _encode(found)

    def stream(self) -> StreamTranslation:
        """No worker streams these answers. Raises UpstreamError."""
        raise UpstreamError(f"The worker's answer is a stream, and no {self.noun}.")


def shorten_vector(vector: Sequence[float], size: int) -> Sequence[float]:
    """The first `size` numbers of a vector, scaled to the length 1. Raises InvalidRequestError if it has fewer numbers.

    This also shortens the vectors of models that weren't trained for shorter vectors.
    """
    if len(vector) < size:
        raise InvalidRequestError(f'"dimensions" is {size}; this model has {len(vector)}.', param="dimensions")
    if len(vector) == size:
        return vector
    kept = vector[:size]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]


class EmbeddingsTranslation:
    """The `Translation` of embeddings with `dimensions`."""

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
                kept = shorten_vector(row["embedding"], size)
                row["embedding"] = base64.b64encode(array("f", kept)).decode() if is_packed else kept

        kept = {name: raw for name, raw in fields.items() if name != "dimensions"}
        return kept | {"encoding_format": msgspec.Raw(b'"float"')}, Completed(complete, "list of embeddings")


class RerankingTranslation:
    """The `Translation` of rankings with `return_documents`."""

    path = "/v1/rerank"

    def request(self, fields: Fields) -> tuple[Fields, Completed]:
        """See Translation."""
        try:
            documents = _documents(fields["documents"])
        except (KeyError, msgspec.MsgspecError) as error:
            message = '"documents" must be a list of texts, or of objects with a text.'
            raise InvalidRequestError(message, param="documents") from error

        def complete(answer: dict[str, Any]) -> None:
            for row in answer["results"]:
                document = documents[row["index"]]
                row["document"] = {"text": document} if isinstance(document, str) else document

        kept = {name: raw for name, raw in fields.items() if name != "return_documents"}
        return kept, Completed(complete, "ranking")
