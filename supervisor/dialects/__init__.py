"""The API dialects, one module or folder each. A path belongs to the first one that owns it; OpenAI owns what is left."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.dialects.llamacpp import LLAMACPP
from supervisor.dialects.openai import OPENAI, OpenAI

DIALECTS: Final[tuple[OpenAI, ...]] = (ANTHROPIC, LLAMACPP, OPENAI)


def dialect_of(path: str) -> OpenAI:
    """The dialect that clients of `path` speak."""
    return next(dialect for dialect in DIALECTS if dialect.owns(path))
