"""Paths of vLLM's server beyond OpenAI's API."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from supervisor.dialects.openai import types
from supervisor.gateway.operation import Group
from supervisor.schema.operation import Example

GROUP: Final = Group(
    "vLLM", "What vLLM's server has besides the paths of OpenAI, Anthropic and Cohere.", scope="inference"
)


def _declare(
    path: str, about: str, reads: type[msgspec.Struct], body: Any, answer: Any, aliases: tuple[str, ...] = ()
) -> None:
    example = Example(body, needs="a model of vllm_serve", answer=answer)
    GROUP.model_endpoint(path, about, reads=reads, answer=types.WorkerData, aliases=aliases, example=example)


def _data_list(**row: Any) -> Any:
    return {"object": "list", "data": [{"index": 0, **row}]}


_declare(
    "/classify",
    "Say which class a text is of.",
    types.ClassifyRequest,
    {"model": "judge", "input": "Hello"},
    _data_list(label="greeting", probs=[0.9, 0.1]),
)
_declare(
    "/pooling",
    "Read the vectors that a model makes of a text, before they are a class or an embedding.",
    types.ClassifyRequest,
    {"model": "judge", "input": "Hello"},
    _data_list(object="pooling", data=[0.6, 0.8]),
)
_declare(
    "/v1/score",
    "How well texts go together.",
    types.ScoreRequest,
    {"model": "reranker", "text_1": "Which is a fruit?", "text_2": "apple"},
    _data_list(object="score", score=0.98),
    aliases=("/score",),
)
_declare(
    "/v2/embed",
    "Cohere's way to turn texts into vectors.",
    types.EmbedRequest,
    {"model": "embedder", "texts": ["Hello"]},
    {"id": "embd-1", "embeddings": {"float": [[0.6, 0.8]]}, "texts": ["Hello"]},
)
