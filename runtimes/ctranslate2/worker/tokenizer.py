"""Tokenizers for CTranslate2, which takes tokens as texts: from a tokenizer.json, or from SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import sentencepiece
import tokenizers

PIECES: Final = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "sentencepiece.model", "spm.model")
PIECES_BY_SIDE: Final = ("source.spm", "target.spm")  # as Opus-MT has them
JSON: Final = "tokenizer.json"


class Tokenizer(Protocol):
    """Turns text into tokens and back. `special` tokens belong to no text."""

    special: frozenset[str]

    def encode(self, text: str) -> list[str]:
        """The tokens of a text. Special tokens that the text spells out are recognised; none are added."""

    def encode_prompt(self, text: str) -> list[str]:
        """The tokens of a prompt, with the special tokens that the model expects around it."""

    def decode(self, tokens: Sequence[str]) -> str:
        """The text of these tokens, special tokens included."""


class JsonTokenizer:
    """A tokenizer from a tokenizer.json."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = frozenset(token.content for token in added if token.special)

    def encode(self, text: str) -> list[str]:
        """See Tokenizer."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).tokens)

    def encode_prompt(self, text: str) -> list[str]:
        """See Tokenizer."""
        return list(self._tokenizer.encode(text).tokens)

    def decode(self, tokens: Sequence[str]) -> str:
        """See Tokenizer. Padding tokens that only the model has are left out."""
        ids = [number for token in tokens if (number := self._tokenizer.token_to_id(token)) is not None]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def name(self, number: int) -> str | None:
        """The token of a number in the tokenizer's own files."""
        token: str | None = self._tokenizer.id_to_token(number)
        return token


class SentencePieces:
    """A tokenizer from SentencePiece models, which may differ for source and target. `before` and `after` surround a prompt."""

    special = frozenset({"<s>", "</s>", "<unk>", "<pad>"})

    def __init__(self, source: Path, target: Path, before: Sequence[str], after: Sequence[str]) -> None:
        self._source = sentencepiece.SentencePieceProcessor(model_file=str(source))
        self._target = sentencepiece.SentencePieceProcessor(model_file=str(target))
        self._before, self._after = list(before), list(after)

    def encode(self, text: str) -> list[str]:
        """See Tokenizer."""
        return list(self._source.encode(text, out_type=str))

    def encode_prompt(self, text: str) -> list[str]:
        """See Tokenizer."""
        return [*self._before, *self.encode(text), *self._after]

    def decode(self, tokens: Sequence[str]) -> str:
        """See Tokenizer."""
        text: str = self._target.decode(list(tokens))
        return text


def load(folder: Path, before: Sequence[str], after: Sequence[str]) -> Tokenizer:
    """The folder's tokenizer. Raises SystemExit without one."""
    if (folder / JSON).is_file():
        return JsonTokenizer(folder / JSON)
    source, target = (folder / name for name in PIECES_BY_SIDE)
    both = [folder / name for name in PIECES]
    found = next((file for file in both if file.is_file()), None)
    if source.is_file() and target.is_file():
        return SentencePieces(source, target, before, after)
    if found is not None:
        return SentencePieces(found, found, before, after)
    raise SystemExit(
        f"{folder} has no tokenizer: {JSON}, or {', '.join(PIECES_BY_SIDE)}, or one of {', '.join(PIECES)}"
    )
