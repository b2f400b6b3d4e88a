"""What a runtime generates: tokens, and how they ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; if requested, its and the alternatives' log probabilities before penalties and temperature."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Reused:
    """Tokens of the prompt that were computed for an earlier request, told before the first token by runtimes that keep them."""

    tokens: int
