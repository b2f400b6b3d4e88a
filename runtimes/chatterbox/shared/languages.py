"""The languages of the multilingual variant."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

from runtimes.shared.languages import NAMES

_CODES: Final = "ar da de el en es fi fr he hi it ja ko ms nl no pl pt ru sv sw tr zh"
LANGUAGES: Final = tuple(_CODES.split())
"""Codes that the library knows (`SUPPORTED_LANGUAGES`; `make test-chatterbox` compares)."""


def valid_codes(given: str, known: Collection[str]) -> str:
    """The valid codes, for an error message, with a suggestion if one is similar."""
    words = {word: language for language in sorted(known) for word in (language, NAMES[language])}
    near = difflib.get_close_matches(given.strip().lower(), words, 1)
    hint = f" (did you mean {words[near[0]]}, {NAMES[words[near[0]]].title()}?)" if near else ""
    return f"one of {', '.join(sorted(known))}{hint}"
