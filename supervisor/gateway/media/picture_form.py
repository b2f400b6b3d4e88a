"""Finds pictures that a worker can't open in a JSON body: by the beginning of their base64, whatever their declared type."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WEBP: Final = "webp"
HEIC: Final = "heic"
AVIF: Final = "avif"
BLANK: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAGElEQVR42mNsYMAPmBhGFYwqGFUwQhUAAJe+AMD8WknZAAAAAElFTkSuQmCC"
)
"""A gray picture: replaces an earlier turn's picture that can't be opened."""
_HINTS: Final = (b"UklGR", b"Z0eXB")  # RIFF, and the `ftyp` of ISO's media files
_PICTURE: Final = re.compile(rb'(?<=[",])(?:UklGR.{6}XRUJQ|AAAA..Z0eXB.)[A-Za-z0-9+/]*(?:\\[/nr][A-Za-z0-9+/]*)*={0,2}')
_ESCAPED: Final = re.compile(rb"\\[nr]?")  # some clients escape slashes, and some break lines
_TEXT_FIELD: Final = re.compile(rb'"(?:content|text|prompt|input)"\s*:\s*"\Z')
_BRANDS: Final = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), HEIC),
    **dict.fromkeys((b"avif", b"avis"), AVIF),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A picture, and the position of its base64."""

    begin: int
    end: int
    data: bytes


def unreadable(body: bytes | bytearray, forms: frozenset[str]) -> list[Found]:
    """The pictures of these formats."""
    if not any(hint in body for hint in _HINTS):
        return []
    found: list[Found] = []
    for match in _PICTURE.finditer(body):
        if _TEXT_FIELD.search(body, max(0, match.start() - 40), match.start()):
            continue
        try:
            data = base64.b64decode(_ESCAPED.sub(b"", match[0]))
        except binascii.Error:  # the worker reports that
            continue
        form = WEBP if data[8:12] == b"WEBP" else _BRANDS.get(data[8:12])
        if form in forms:
            found.append(Found(match.start(), match.end(), data))
    return found


def replaced(body: bytes | bytearray, found: Sequence[Found], by: Sequence[bytes]) -> bytes:
    """The body with other pictures in place of these."""
    parts: list[bytes] = []
    at = 0
    for place, data in zip(found, by, strict=True):
        parts += (bytes(body[at : place.begin]), base64.b64encode(data))
        at = place.end
    return b"".join((*parts, bytes(body[at:])))


def is_earlier(body: bytes | bytearray, found: Found) -> bool:
    """Has the model answered since this picture?"""
    return body.rfind(b'"assistant"') > found.begin
