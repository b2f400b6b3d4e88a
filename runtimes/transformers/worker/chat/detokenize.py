"""Tokens to text as they come. A character that is cut between tokens waits for the rest of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

BROKEN: Final = "\ufffd"
PATIENCE: Final = 8  # tokens: a character has at most four bytes, so after this many the bytes are wrong


class Detokenizer:
    """`decode` gives the text of a whole list of tokens; only short lists are decoded, whatever the length of the text.

    Two or three tokens before the new ones are decoded with them, because some tokenizers write a token differently at the
    beginning of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0  # of these, so many are given out
        self._text = ""  # their text

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) and len(self._ids) - self._known < PATIENCE:
            return ""
        return self._give(text)

    def end(self) -> str:
        """What still waits; a character that stayed incomplete is U+FFFD."""
        return self._give(self._decode(self._ids)) if len(self._ids) > self._known else ""

    def _give(self, text: str) -> str:
        new = text[len(self._text) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._text = self._decode(self._ids)
        return new
