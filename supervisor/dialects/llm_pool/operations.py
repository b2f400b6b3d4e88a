"""The operation of llm-pool's clients."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.llm_pool.types import LlmPoolRequest, LlmPoolResponse
from supervisor.gateway.operation import Group
from supervisor.schema.operation import EVENTS, Example

GROUP: Final = Group(
    "llm-pool",
    "The requests of llm-pool, on the path of OpenAI's Responses: they are told by their fields.",
    scope="inference",
)
GROUP.model_endpoint(
    "/v1/responses",
    "As llm-pool asks.\n\n"
    "A stream has the events `response.created`, `response.output_text.delta` for each piece of text as it comes, "
    "`response.metrics` and `response.completed`, which has the whole answer. A failure is an event `error`, after which none "
    "follows. What the model thinks is no part of the text.",
    reads=LlmPoolRequest,
    answer=LlmPoolResponse,
    stream_type=EVENTS,
    example=Example(
        {
            "model": "Tiny-Instruct",
            "instructions": "Translate to Dutch.",
            "input": "Good morning.",
            "thinking": "disabled",
            "decoding": {"temperature": 0, "max_tokens": 256},
        }
    ),
)
