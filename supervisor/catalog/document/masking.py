"""Masks likely secrets, by the name of a key or by the form of a value, when a configuration is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pydantic import JsonValue

MASK: Final = "***"
_SECRET = re.compile(
    r"(?i:(?:^|[^A-Z])(?:API)?(?:KEY|TOKEN|AUTH|PAT)(?:$|[^A-Z]))"
    r"|(?i:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION)"
    r"|[a-z](?:Key|Token|Auth)(?:$|[^a-z])"
)
_IN_TEXT = re.compile(
    r"(://(?:[^/\s:@]*:)?)[^/\s@]+(?=@)"
    r"|(\b(?:Bearer|Basic)\s+)[^\s\"']+"
    r"|(?<![\w/.-])(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[a-z]-)[\w-]{16,}"
)

_NAME = re.compile(r'(\\?)"([^"\\]{1,100})\1"\s*:')
"""The name of a field of JSON, or of JSON in a string of JSON."""
_ENDS = r"|[\[{\]}]|[^\s,\[{}\]\"\\]+"
_TOKENS: Final = {
    "": re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)' + _ENDS, re.DOTALL),
    "\\": re.compile(r'\\"[^"\\]*(?:\\\\(?:\\.|.)[^"\\]*)*(?:\\"|\\*\Z)' + _ENDS, re.DOTALL),
}
"""Matches the value of such a field, by the text before its quotes. The end of the text may lie in a string."""


def masked(value: JsonValue, key: str) -> JsonValue:
    """The value of a configuration's `key`, with secrets masked."""
    match value:
        case dict():
            return {
                name: MASK if _SECRET.search(name) and item is not None else masked(item, key)
                for name, item in value.items()
            }
        case list() if all(isinstance(word, str) for word in value):
            return [masked_text(word) for word in _masked_words([str(word) for word in value])]
        case list():
            return [masked(item, key) for item in value]
        case str() if key in {"cmd", "stop_cmd", "kill_cmd"}:
            return masked_text(" ".join(_masked_words(value.split())))
        case str():
            return masked_text(value)
        case _:
            return value


def masked_text(text: str) -> str:
    """Text without passwords in URLs, credentials of headers, and tokens of well-known kinds."""
    return _IN_TEXT.sub(lambda found: (found[1] or found[2] or "") + MASK, text)


def masked_fields(text: str) -> str:
    """The text without values of fields that are named like a secret. The JSON may be truncated, or be in a string."""
    parts: list[str] = []
    at = 0
    for found in _NAME.finditer(text):
        if found.start() >= at and _SECRET.search(found[2]):
            parts += text[at : found.end()], MASK
            at = _end_of_value(text, found.end(), _TOKENS[found[1]])
    return "".join([*parts, text[at:]])


def _end_of_value(text: str, start: int, tokens: re.Pattern[str]) -> int:
    depth = 0
    for token in tokens.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth <= 0:
            return token.end()
    return len(text)


def _masked_words(words: list[str]) -> Iterator[str]:
    """A command line without the values of options that are named like a secret."""
    after_secret = False
    for word in words:
        option, equals, _ = word.partition("=")
        if equals and _SECRET.search(option):
            yield f"{option}={MASK}"
        elif after_secret and not word.startswith("-"):
            yield MASK
        else:
            yield word
        after_secret = word.startswith("-") and not equals and _SECRET.search(word) is not None
