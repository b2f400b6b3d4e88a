"""Long text in pieces that can be spoken one after the other: whole sentences, none too long, the first one short.

Speech of the first piece is on its way to the listener while the next one is made. The pieces together are the text, with
its white space made single spaces.
"""

from __future__ import annotations

import re

FIRST, MAX_CHARACTERS = 120, 300
"""Characters of the first piece and of any: the first decides when the listener hears something, the model speaks 40 s at
most in one go."""

_END = re.compile(r"""(?<=[.!?…])["'»”’)\]]*\s+(?=["'«„“‘(\[¿¡]*[\w])|(?<=[。！？])""")
_PAUSE = re.compile(r"(?<=[,;:–—])\s+|(?<=[、，；：])")
_SHORT = re.compile(
    r"(?:^|\s)(?:\w|Dr|Mrs?|Ms|Prof|St|Jr|Sr|Nr|No|Hr|Fr|\d+|z\. ?B|d\. ?h|u\. ?a|e\.g|i\.e|ca|bzw|vgl|vs)\.$"
)
"""What a full stop after doesn't end a sentence: initials, titles, ordinal numbers, abbreviations."""


def pieces(text: str) -> list[str]:
    """The text's pieces, in order; empty for a text without anything to say."""
    found: list[str] = []
    for sentence in _sentences(" ".join(text.split())):
        for part in _parts(sentence):
            room = FIRST if len(found) <= 1 else MAX_CHARACTERS
            if found and len(found[-1]) + 1 + len(part) <= room:
                found[-1] += _space(found[-1]) + part
            else:
                found.append(part)
    return found


def _sentences(text: str) -> list[str]:
    found: list[str] = []
    start = 0
    for match in _END.finditer(text):
        sentence = text[start : match.end()].strip()
        if sentence and not _SHORT.search(_last_words(text, start, match.start())):
            found.append(sentence)
            start = match.end()
    return [*found, text[start:]] if text[start:] else found


def _last_words(text: str, start: int, end: int) -> str:
    """As much of it as `_SHORT` looks at: a text of nothing but abbreviations is long for each of them."""
    last = text.rfind(" ", start, end)
    return text[max(start, text.rfind(" ", start, max(last, start))) : end]


def _parts(sentence: str) -> list[str]:
    """A sentence that is too long is cut at a comma, else at a space, else anywhere."""
    found: list[str] = []
    while len(sentence) > MAX_CHARACTERS:
        head = sentence[:MAX_CHARACTERS]
        cuts = [match.end() for match in _PAUSE.finditer(head) if match.end() > MAX_CHARACTERS // 3]
        cut = cuts[-1] if cuts else head.rfind(" ") + 1 or MAX_CHARACTERS
        found.append(sentence[:cut].strip())
        sentence = sentence[cut:].strip()
    return [*found, sentence] if sentence else found


def _space(before: str) -> str:
    return "" if before[-1] in "。！？、，；：" else " "
