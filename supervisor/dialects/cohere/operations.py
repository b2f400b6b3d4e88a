"""The operation of Cohere's clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from supervisor.dialects.openai.operations import RERANKED
from supervisor.dialects.openai.types import Reranking, RerankRequest
from supervisor.gateway.operation import Group

GROUP: Final = Group("Cohere", "Cohere's reranking.", scope="inference")


class CohereReranking(Reranking):
    """Texts in their order, as Cohere answers."""

    id: str
    meta: dict[str, Any]


GROUP.model_endpoint(
    "/v2/rerank",
    """`/v1/rerank`, whose answers have Cohere's `id` and `meta` as well.

    llama.cpp ignores `max_tokens_per_doc`.""",
    reads=RerankRequest,
    answer=CohereReranking,
    example=replace(
        RERANKED,
        answer={
            "results": [{"index": 0, "relevance_score": 0.98}],
            "id": "07734bd2-2473-4f07-94e1-0d9f0e6843cf",
            "meta": {
                "api_version": {"version": "2", "is_experimental": False},
                "billed_units": {"search_units": 1},
            },
        },
    ),
)
