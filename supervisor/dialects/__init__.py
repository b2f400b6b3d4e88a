"""The API dialects, a folder each. A new dialect is added here and nowhere else.

A request belongs to the first dialect that its client speaks. OpenAI's is the last one, for all other requests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.dialects.cohere import COHERE
from supervisor.dialects.llamacpp import LLAMACPP
from supervisor.dialects.ollama import OLLAMA
from supervisor.dialects.openai import OPENAI, OpenAI
from supervisor.dialects.responses import RESPONSES
from supervisor.dialects.runner import RUNNER
from supervisor.gateway.disconnect import Scope

DIALECTS: Final[tuple[OpenAI, ...]] = (RUNNER, ANTHROPIC, LLAMACPP, RESPONSES, COHERE, OLLAMA, OPENAI)

OPERATIONS: Final = (
    "supervisor.dialects.openai.operations",
    "supervisor.dialects.openai.media_operations",
    "supervisor.dialects.openai.worker_operations",
    "supervisor.dialects.responses.operations",
    "supervisor.dialects.llm_pool.operations",
    "supervisor.dialects.anthropic.operations",
    "supervisor.dialects.llamacpp.operations",
    "supervisor.dialects.cohere.operations",
    "supervisor.dialects.ollama.operations",
    "supervisor.dialects.runner.operations",
)
"""The modules that declare the dialects' operations, in the order of the documentation; see `gateway.operation`."""


def dialect_of(scope: Scope) -> OpenAI:
    """The dialect that the client of a request speaks."""
    for dialect in _owners(scope["path"]):  # a loop, not a generator: each request comes here
        if not dialect.shares_paths or dialect.is_spoken_by(scope):
            return dialect
    raise AssertionError("the last one owns every path")


@lru_cache(64)  # clients choose the paths, but few make sense
def _owners(path: str) -> tuple[OpenAI, ...]:
    return tuple(dialect for dialect in DIALECTS if dialect.owns(path))
