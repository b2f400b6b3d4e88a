"""Turns tokens into text, one by one. A character split across tokens waits for its last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

BROKEN: Final = "\ufffd"
PATIENCE: Final = 8  # tokens: a character has at most four bytes, so after this many the bytes are wrong


class Detokenizer:
    """`decode` gives the text of a list of tokens. Only short lists are decoded, however long the text.

    New tokens are decoded together with the two or three before them: some tokenizers write a token differently at the
    beginning of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._output_count = 0  # how many of these are in the output
        self._output_text = ""  # their text

    def feed(self, token: int) -> str:
        """Add a token. Returns the text that it completes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) and len(self._ids) - self._output_count < PATIENCE:
            return ""
        return self._take_new_text(text)

    def end(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD."""
        return self._take_new_text(self._decode(self._ids)) if len(self._ids) > self._output_count else ""

    def _take_new_text(self, text: str) -> str:
        new = text[len(self._output_text) :]
        self._ids = self._ids[self._output_count :]
        self._output_count = len(self._ids)
        self._output_text = self._decode(self._ids)
        return new
