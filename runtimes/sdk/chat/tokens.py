"""The output of a runtime: tokens, and the reason of their end."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Ending = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. If requested, with log probabilities of it and of alternatives, before penalties and temperature."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Reused:
    """The number of prompt tokens reused from an earlier request. Runtimes with a prompt cache send it before the first token."""

    tokens: int


class Results:
    """A queue of tokens from the model's thread to the answering thread. Ends with the reason of the end, or an error."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Token | Ending | BaseException] = queue.SimpleQueue()

    def put(self, item: Token | Ending | BaseException) -> None:
        """Add the next item. Returns at once."""
        self._items.put(item)

    def __iter__(self) -> Iterator[Token | Ending]:
        """Yields the items as they come, to the end. Blocks. Raises the error."""
        while True:
            item = self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if isinstance(item, str):
                return
