"""Cohere's `/v2/rerank`: workers answer it as `/v1/rerank`, and what their answers lack of Cohere's is put in."""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from supervisor.dialects.openai import OpenAI
from supervisor.proxy.translation import StreamTranslation

ANSWER_LIMIT: Final = 4 * 1024 * 1024  # a longer answer passes as it is
_META: Final = msgspec.Raw(
    b'{"api_version":{"version":"2","is_experimental":false},"billed_units":{"search_units":1}}'
)  # a request is one search
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Cohere(OpenAI):
    """As OpenAI's other paths, but for what an answer holds."""

    name = "cohere"

    def owns(self, path: str) -> bool:
        """Reranking alone."""
        return path == "/v2/rerank"

    def completion(self, model: str, *, stream: bool) -> StreamTranslation:
        """See Dialect."""
        return Completion()


class Completion:
    """An answer that gets an `id` and `meta` if it has none. It is held back until it is whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """Nothing yet, or an answer that is too long."""
        self._held += piece
        return self._taken() if len(self._held) > ANSWER_LIMIT else b""

    def end(self) -> bytes:
        """All of it."""
        body = self._taken()
        try:
            fields = _fields(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return body
        ours = {"id": msgspec.Raw(msgspec.json.encode(str(uuid.uuid4()))), "meta": _META}
        return body if ours.keys() <= fields.keys() else msgspec.json.encode(ours | fields)

    def _taken(self) -> bytes:
        taken, self._held = bytes(self._held), bytearray()
        return taken


COHERE: Final = Cohere()
