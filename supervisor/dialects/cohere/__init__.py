"""Cohere's `/v2/rerank`: workers answer it like `/v1/rerank`, and llmux adds the missing fields of Cohere's API."""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects.buffered_response import BufferedResponse
from supervisor.dialects.openai import OpenAI
from supervisor.gateway.filters.translation import StreamTranslation

_META: Final = msgspec.Raw(
    b'{"api_version":{"version":"2","is_experimental":false},"billed_units":{"search_units":1}}'
)  # a request is one search


class Cohere(OpenAI):
    """Like OpenAI's dialect, with additional fields in the answers."""

    name = "cohere"

    def owns(self, path: str) -> bool:
        """The path of reranking."""
        return path == "/v2/rerank"

    def repair(self, model: str, fields: Fields, *, stream: bool) -> StreamTranslation:
        """See Dialect."""
        return CohereRepair()


class CohereRepair(BufferedResponse):
    """Adds missing `id` and `meta` to an answer."""

    def changed(self, fields: Fields) -> Fields | None:
        """See BufferedResponse."""
        ours = {"id": msgspec.Raw(msgspec.json.encode(str(uuid.uuid4()))), "meta": _META}
        return None if ours.keys() <= fields.keys() else ours | fields


COHERE: Final = Cohere()
