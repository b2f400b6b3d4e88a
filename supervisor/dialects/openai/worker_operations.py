"""Paths of vLLM's server beside OpenAI's."""

from __future__ import annotations

from typing import Any, Final

from supervisor.dialects.openai.schemas import X_FIELDS
from supervisor.schema.operation import Example, Operation, Section, anything, array, record, request, text

_TEXTS: Final = {"anyOf": [text(), array(minItems=1)]}
_NEEDS: Final = "a model of vllm_serve"


def _operation(path: str, summary: str, body: dict[str, Any], answer: dict[str, Any], *aliases: str) -> Operation:
    fields = {name: _TEXTS for name in body if name != "model"}
    return Operation(
        "POST",
        path,
        summary,
        request=request({"model": text(), **fields, **X_FIELDS}, *fields, more=True),
        answer=record({"data": array(anything())}, more=True, optional=("data",)),
        is_run=True,
        aliases=aliases,
        example=Example(body, needs=_NEEDS, answer=answer),
    )


_SCORED: Final = {"object": "list", "data": [{"index": 0, "object": "score", "score": 0.98}]}
SECTION: Final = Section(
    "vLLM",
    "What vLLM's server has besides the paths of OpenAI, Anthropic and Cohere.",
    (
        _operation(
            "/classify",
            "Say which class a text is of.",
            {"model": "judge", "input": "Hello"},
            {"object": "list", "data": [{"index": 0, "label": "greeting", "probs": [0.9, 0.1]}]},
        ),
        _operation(
            "/pooling",
            "What a model makes of a text, before it is a class or a vector.",
            {"model": "judge", "input": "Hello"},
            {"object": "list", "data": [{"index": 0, "object": "pooling", "data": [0.6, 0.8]}]},
        ),
        _operation(
            "/v1/score",
            "How well texts go together.",
            {"model": "reranker", "text_1": "Which is a fruit?", "text_2": "apple"},
            _SCORED,
            "/score",
        ),
        _operation(
            "/v2/embed",
            "Cohere's way to turn texts into vectors.",
            {"model": "embedder", "texts": ["Hello"]},
            {"id": "embd-1", "embeddings": {"float": [[0.6, 0.8]]}, "texts": ["Hello"]},
        ),
    ),
)
