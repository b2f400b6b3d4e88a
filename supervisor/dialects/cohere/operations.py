"""What Cohere's clients ask for."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.openai.schemas import RERANK_REQUEST, RERANKED, RERANKING
from supervisor.schema.operation import Example, Operation, Section, anything, mapping, record, text

SECTION: Final = Section(
    "Cohere",
    "Cohere's reranking.",
    (
        Operation(
            "POST",
            "/v2/rerank",
            "`/v1/rerank`, whose answers have Cohere's `id` and `meta` as well.",
            "llama.cpp ignores `max_tokens_per_doc`.",
            request=RERANK_REQUEST,
            answer={"allOf": [RERANKING, record({"id": text(), "meta": mapping(anything())}, more=True)]},
            is_run=True,
            example=Example(
                **RERANKED,
                answer={
                    "results": [{"index": 0, "relevance_score": 0.98}],
                    "id": "07734bd2-2473-4f07-94e1-0d9f0e6843cf",
                    "meta": {
                        "api_version": {"version": "2", "is_experimental": False},
                        "billed_units": {"search_units": 1},
                    },
                },
            ),
        ),
    ),
)
