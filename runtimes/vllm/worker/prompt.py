"""What the engine reads: a prompt's tokens, its pictures, and what the answer is held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtimes.sdk.chat.worker import Prompt as TextPrompt


@dataclass(frozen=True, slots=True)
class Prompt(TextPrompt):
    """`inputs`: what the engine takes. `grammar`: what may be generated, in llguidance's Lark; None: anything."""

    inputs: Any = field(default=None, repr=False)
    grammar: str | None = None
