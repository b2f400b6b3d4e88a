"""The API dialects, one folder each. Only this module lists them, so a new dialect is registered here.

A request belongs to the first dialect in the list that its client speaks. OpenAI's is the last and takes all other requests.
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
    for dialect in _dialects_owning(scope["path"]):  # a loop: faster than a generator, on each request
        if not dialect.shares_paths or dialect.is_spoken_by(scope):
            return dialect
    raise AssertionError("the last one owns every path")


@lru_cache(64)  # bounded, because clients choose the paths
def _dialects_owning(path: str) -> tuple[OpenAI, ...]:
    return tuple(dialect for dialect in DIALECTS if dialect.owns(path))
