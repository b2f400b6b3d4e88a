"""The API dialects, one module or folder each. A request belongs to the first one that its client speaks: OpenAI's
is spoken wherever no other is.
"""

from __future__ import annotations

from typing import Final

from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.dialects.llamacpp import LLAMACPP
from supervisor.dialects.openai import OPENAI, OpenAI
from supervisor.dialects.responses import RESPONSES
from supervisor.proxy.disconnect import Scope

DIALECTS: Final[tuple[OpenAI, ...]] = (ANTHROPIC, LLAMACPP, RESPONSES, OPENAI)


def dialect_of(scope: Scope) -> OpenAI:
    """The dialect that the client of a request speaks."""
    return next(dialect for dialect in DIALECTS if dialect.is_spoken_by(scope))
