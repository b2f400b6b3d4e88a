"""The API dialects, one module or folder each. A request belongs to the first one that its client speaks: OpenAI's
is spoken wherever no other is.
"""

from __future__ import annotations

from typing import Final

from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.dialects.cohere import COHERE
from supervisor.dialects.llamacpp import LLAMACPP
from supervisor.dialects.openai import OPENAI, OpenAI
from supervisor.dialects.responses import INPUT_TOKENS, RESPONSES
from supervisor.proxy.disconnect import Scope

DIALECTS: Final[tuple[OpenAI, ...]] = (ANTHROPIC, LLAMACPP, RESPONSES, INPUT_TOKENS, COHERE, OPENAI)


def dialect_of(scope: Scope) -> OpenAI:
    """The dialect that the client of a request speaks."""
    path = scope["path"]
    for dialect in DIALECTS:  # a loop, not a generator: each request comes here
        if dialect.owns(path) and dialect.is_spoken_by(scope):
            return dialect
    raise AssertionError("the last one owns every path")
