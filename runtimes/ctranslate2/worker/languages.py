"""The language tokens of a translation model. Each family of models puts them in different places.

NLLB, M2M-100 and mBART begin source and target each with its language. MADLAD-400 and Opus-MT's models for many languages
begin the source with the target's. Other models have one pair of languages, and no such tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from runtimes.ctranslate2.shared.language_tokens import BEFORE_SOURCE, BEGINNING
from runtimes.sdk.errors import WorkerError

_FORMS: Final = ("{}", "__{}__", "<2{}>", ">>{}<<")
_MOST_SHOWN: Final = 8


class Languages:
    """The language tokens of a vocabulary."""

    def __init__(self, vocabulary: Collection[str]) -> None:
        self._source_or_target = {token for token in vocabulary if BEGINNING.fullmatch(token)}
        self._targets = {token for token in vocabulary if BEFORE_SOURCE.fullmatch(token)}

    @property
    def tokens(self) -> frozenset[str]:
        """All language tokens."""
        return frozenset(self._source_or_target | self._targets)

    def prefix_tokens(self, source: str | None, target: str | None) -> tuple[list[str], list[str]]:
        """The tokens before the source text, and before the target text. Raises WorkerError for an unknown language."""
        if not self.tokens:
            for name, code in (("source_lang_code", source), ("target_lang_code", target)):
                if code is not None:
                    raise WorkerError(f"This model translates one pair of languages: leave {name} out.", param=name)
            return [], []
        if target is None:
            message = f"Say into which language, with target_lang_code, such as {self._examples()}."
            raise WorkerError(message, code="missing_parameter", param="target_lang_code")
        into = self._find_token(target, "target_lang_code")
        if into in self._targets:
            return [into], []
        return [] if source is None else [self._find_token(source, "source_lang_code")], [into]

    def _find_token(self, code: str, param: str) -> str:
        found = next((token for form in _FORMS if (token := form.format(code)) in self.tokens), None)
        if found is None:
            message = f"{param} is {code[:50]!r}, which this model doesn't know; it knows {self._examples()}."
            raise WorkerError(message, param=param)
        return found

    def _examples(self) -> str:
        codes = sorted(token.strip("_<>").removeprefix("2") for token in self.tokens)
        more = f" and {len(codes) - _MOST_SHOWN} more" if len(codes) > _MOST_SHOWN else ""
        return ", ".join(codes[:_MOST_SHOWN]) + more
