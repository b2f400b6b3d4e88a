"""The output of parsers: pieces of the answer, of reasoning, and of calls, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the first has index 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which together are JSON."""

    index: int
    text: str


Piece = Text | Thought | CallStart | CallArguments
Schemas = Mapping[str, Mapping[str, object]]
"""JSON Schemas of the parameters of each function, by name."""


def merge_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces with neighbours of one kind joined, and without empty pieces."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            out[-1] = Thought(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            out[-1] = CallArguments(piece.index, last.text + piece.text)
        elif isinstance(piece, CallStart) or piece.text:
            out.append(piece)
    return out


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """The position of the first marker, and the marker; at equal positions the longest."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    found = [item for item in found if item[0] >= 0]
    return None if not found else (min(found)[0], min(found)[2])


def partial_marker(text: str, markers: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
