"""llm-pool's requests to `/v1/responses`, as chat completions.

llm-pool's API has the path of OpenAI's Responses, but other fields: `messages`, `decoding`, `thinking`, and others for the
content of `input`. Workers that serve the path leave out what they don't know, so a request that says "think not" would
think. Therefore such a request is known by its fields, and translated whatever its worker serves.

`decode` maps requests, `encode` answers; `metrics` reckons the times that each answer has.
"""

from __future__ import annotations

from supervisor.dialects.llm_pool.decode import LLM_POOL, LlmPool, is_llm_pool

__all__ = ["LLM_POOL", "LlmPool", "is_llm_pool"]
