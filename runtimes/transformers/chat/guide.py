"""Makes a model call a tool: it may think first, then one of the offered calls is all that it can begin.

Each stage offers several texts as tokens, and every step allows only tokens that continue one of them. After a stage the
model goes on freely: with the arguments after a call's beginning, with its thought after a thought's beginning, until the
token comes that ends the thought and begins the next stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Way:
    """A text that may begin here, as tokens. `until`: a thought, which that token ends; None: the call itself."""

    tokens: tuple[int, ...]
    until: int | None = None


@dataclass(slots=True)
class Guide:
    """`then` are the ways after a thought. `open_thought`: the prompt ends within one, which that token ends."""

    ways: Sequence[Way]
    then: Sequence[Way] = ()
    open_thought: int | None = None
    done: bool = False
    _at: int = 0
    _left: list[Way] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = list(self.ways)

    @property
    def allowed(self) -> list[int] | None:
        """The only tokens that may come next; None: any, as long as the answer goes on until `done`."""
        if self.done or self.open_thought is not None:
            return None
        return sorted({way.tokens[self._at] for way in self._left})

    def advance(self, token: int) -> None:
        """What came next."""
        if self.done:
            return
        if self.open_thought is not None:
            if token == self.open_thought:
                self.open_thought, self._at, self._left = None, 0, list(self.then)
            return
        self._left = [way for way in self._left if way.tokens[self._at] == token]
        self._at += 1
        ended = next((way for way in self._left if len(way.tokens) == self._at), None)
        if ended is not None:
            self.open_thought = ended.until
            self.done = ended.until is None
