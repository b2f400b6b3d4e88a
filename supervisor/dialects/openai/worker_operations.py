"""Paths of vLLM's server beside OpenAI's."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.openai import types
from supervisor.gateway.operation import Group
from supervisor.schema.operation import Example

GROUP: Final = Group(
    "vLLM", "What vLLM's server has besides the paths of OpenAI, Anthropic and Cohere.", scope="inference"
)
_NEEDS: Final = "a model of vllm_serve"
GROUP.asked(
    "/classify",
    "Say which class a text is of.",
    reads=types.ClassifyRequest,
    answer=types.WorkerData,
    example=Example(
        {"model": "judge", "input": "Hello"},
        needs=_NEEDS,
        answer={"object": "list", "data": [{"index": 0, "label": "greeting", "probs": [0.9, 0.1]}]},
    ),
)
GROUP.asked(
    "/pooling",
    "Read the vectors that a model makes of a text, before they are a class or an embedding.",
    reads=types.ClassifyRequest,
    answer=types.WorkerData,
    example=Example(
        {"model": "judge", "input": "Hello"},
        needs=_NEEDS,
        answer={"object": "list", "data": [{"index": 0, "object": "pooling", "data": [0.6, 0.8]}]},
    ),
)
GROUP.asked(
    "/v1/score",
    "How well texts go together.",
    reads=types.ScoreRequest,
    answer=types.WorkerData,
    aliases=("/score",),
    example=Example(
        {"model": "reranker", "text_1": "Which is a fruit?", "text_2": "apple"},
        needs=_NEEDS,
        answer={"object": "list", "data": [{"index": 0, "object": "score", "score": 0.98}]},
    ),
)
GROUP.asked(
    "/v2/embed",
    "Cohere's way to turn texts into vectors.",
    reads=types.EmbedRequest,
    answer=types.WorkerData,
    example=Example(
        {"model": "embedder", "texts": ["Hello"]},
        needs=_NEEDS,
        answer={"id": "embd-1", "embeddings": {"float": [[0.6, 0.8]]}, "texts": ["Hello"]},
    ),
)
