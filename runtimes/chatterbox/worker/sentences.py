"""Splits long text into pieces that are synthesised one by one: whole sentences, none too long, the first one short.

The first piece is sent while the next one is synthesised. The pieces together are the text, with white space normalised.
"""

from __future__ import annotations

import re

FIRST, MAX_CHARACTERS = 120, 300
"""Characters of the first piece, which decides the latency, and of any: the model generates at most 40 s at once."""

_END = re.compile(r"""(?<=[.!?…])["'»”’)\]]*\s+(?=["'«„“‘(\[¿¡]*[\w])|(?<=[。！？])""")
_PAUSE = re.compile(r"(?<=[,;:–—])\s+|(?<=[、，；：])")
_SHORT = re.compile(
    r"(?:^|\s)(?:\w|Dr|Mrs?|Ms|Prof|St|Jr|Sr|Nr|No|Hr|Fr|\d+|z\. ?B|d\. ?h|u\. ?a|e\.g|i\.e|ca|bzw|vgl|vs)\.$"
)
"""Words after which a full stop ends no sentence: initials, titles, ordinal numbers, abbreviations."""


def pieces(text: str) -> list[str]:
    """The text's pieces, in order; none for a blank text."""
    found: list[str] = []
    for sentence in _split_sentences(" ".join(text.split())):
        for part in _split_long(sentence):
            limit = FIRST if len(found) <= 1 else MAX_CHARACTERS
            if found and len(found[-1]) + 1 + len(part) <= limit:
                found[-1] += _separator(found[-1]) + part
            else:
                found.append(part)
    return found


def _split_sentences(text: str) -> list[str]:
    found: list[str] = []
    start = 0
    for match in _END.finditer(text):
        sentence = text[start : match.end()].strip()
        if sentence and not _SHORT.search(_last_words(text, start, match.start())):
            found.append(sentence)
            start = match.end()
    return [*found, text[start:]] if text[start:] else found


def _last_words(text: str, start: int, end: int) -> str:
    """The text before `end` that `_SHORT` has to see. Searching the whole text would take quadratic time."""
    last = text.rfind(" ", start, end)
    return text[max(start, text.rfind(" ", start, max(last, start))) : end]


def _split_long(sentence: str) -> list[str]:
    """The parts of a long sentence, cut at commas, else at spaces, else anywhere."""
    found: list[str] = []
    while len(sentence) > MAX_CHARACTERS:
        head = sentence[:MAX_CHARACTERS]
        cuts = [match.end() for match in _PAUSE.finditer(head) if match.end() > MAX_CHARACTERS // 3]
        cut = cuts[-1] if cuts else head.rfind(" ") + 1 or MAX_CHARACTERS
        found.append(sentence[:cut].strip())
        sentence = sentence[cut:].strip()
    return [*found, sentence] if sentence else found


def _separator(before: str) -> str:
    return "" if before[-1] in "。！？、，；：" else " "
