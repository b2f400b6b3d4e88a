"""Translates llm-pool's requests to `/v1/responses` into chat completions.

llm-pool's API has the path of OpenAI's Responses, but other fields: `messages`, `decoding`, `thinking`, and other parts in
`input`. Workers that serve the path ignore unknown fields, so a model would think although the request forbids that.
Therefore llmux recognises such a request by its fields, and always translates it, even if its worker serves the path.

`decode` translates requests, `encode` translates answers, and `metrics` computes the times in each answer.
"""

from __future__ import annotations

from supervisor.dialects.llm_pool.decode import LLM_POOL, LlmPool, is_llm_pool

__all__ = ["LLM_POOL", "LlmPool", "is_llm_pool"]
