"""A streaming parser written as one generator: it continues as text arrives, so the position in the code is the position in the format."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from typing import TypeVar

from runtimes.sdk.chat.formats.pieces import Piece, first_marker, partial_marker

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that reads from the buffer. It yields when it needs more text, and again after the end."""


class Reader(abc.ABC):
    """The base of parsers. `buffer`: text not read yet. `ended`: no more text will come. `out`: the finished pieces."""

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.out: list[Piece] = []
        self._reading = self.read()

    @abc.abstractmethod
    def read(self) -> Reading[None]:
        """The parser itself, as a generator."""

    def feed(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are certain now."""
        self.buffer += text
        next(self._reading, None)
        out, self.out = self.out, []
        return out

    def end(self) -> list[Piece]:
        """The remaining pieces. Call it when the text has ended."""
        self.ended = True
        return self.feed("")

    def read_until(self, markers: tuple[str, ...], output: Callable[[str], object]) -> Reading[str]:
        """Read up to a marker, and pass all text before it to `output` while it arrives. Returns the marker; empty at the end."""
        while True:
            found = first_marker(self.buffer, markers)
            keep = 0 if self.ended else partial_marker(self.buffer, markers)
            cut = len(self.buffer) - keep if found is None else found[0]
            text, self.buffer = self.buffer[:cut], self.buffer[cut:]
            if text:
                output(text)
            if found is not None:
                self.buffer = self.buffer[len(found[1]) :]
                return found[1]
            if self.ended:
                return ""
            yield

    def read_before(self, marker: str) -> Reading[str | None]:
        """Read up to a marker. Returns the text before it; None, with nothing read, if the marker never comes."""
        while marker not in self.buffer:
            if self.ended:
                return None
            yield
        text, _, self.buffer = self.buffer.partition(marker)
        return text


def ignore(_text: str) -> None:
    """Drops the text: an argument for `read_until`."""
