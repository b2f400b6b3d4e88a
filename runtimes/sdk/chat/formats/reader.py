"""A streaming parser written as one generator: it reads on as text comes, so its place in the format is its place in the code."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from typing import TypeVar

from runtimes.sdk.chat.formats.pieces import Piece, earliest, partial_marker

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads from the buffer; yields when it needs more text, and again after the end."""


class Reader(abc.ABC):
    """`buffer` is the text not read yet, `ended` says that no more comes, `out` takes what is certain."""

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.out: list[Piece] = []
        self._reading = self.read()

    @abc.abstractmethod
    def read(self) -> Reading[None]:
        """The format."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        self.buffer += text
        next(self._reading, None)
        out, self.out = self.out, []
        return out

    def end(self) -> list[Piece]:
        """The rest, when the text has ended."""
        self.ended = True
        return self.feed("")

    def until(self, markers: tuple[str, ...], say: Callable[[str], object]) -> Reading[str]:
        """Read up to a marker and give all text before it to `say` as it comes. The marker; empty at the end."""
        while True:
            found = earliest(self.buffer, markers)
            keep = 0 if self.ended else partial_marker(self.buffer, markers)
            cut = len(self.buffer) - keep if found is None else found[0]
            said, self.buffer = self.buffer[:cut], self.buffer[cut:]
            if said:
                say(said)
            if found is not None:
                self.buffer = self.buffer[len(found[1]) :]
                return found[1]
            if self.ended:
                return ""
            yield

    def before(self, marker: str) -> Reading[str | None]:
        """Read up to a marker. The text before it; None, and nothing is read, if it never comes."""
        while marker not in self.buffer:
            if self.ended:
                return None
            yield
        text, _, self.buffer = self.buffer.partition(marker)
        return text


def ignore(_text: str) -> None:
    """For text that says nothing."""
