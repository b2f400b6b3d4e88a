"""What a runtime generates: tokens, and how they ended."""

from __future__ import annotations

import queue
from collections.abc import Iterator
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


class Results:
    """Tokens on their way from the thread that runs the model to the one that answers, then how they ended, or an error."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Token | Ending | BaseException] = queue.SimpleQueue()

    def put(self, item: Token | Ending | BaseException) -> None:
        """The next one. Returns at once."""
        self._items.put(item)

    def __iter__(self) -> Iterator[Token | Ending]:
        """As they come, to the end; blocks. Raises the error."""
        while True:
            item = self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if isinstance(item, str):
                return
