"""The outline of a large body: the same JSON with its long strings cut short, so that scanning it is fast.

Megabytes of a body are pictures, which are not needed to find the model, to look for references, or to change a field. A
cut part has no quote and no backslash, so every parser sees it within its string. It has no colon either, so it can't contain
the sign of a reference (see `media`). A mark replaces it until the body is restored. Text with these characters is not
cut, and neither is a body with many strings: that is scanned as a whole.

Other tasks run every few hundred microseconds during the search.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Final

_SLICE: Final = 2 * 1024 * 1024  # bytes between two turns of the loop; a byte is found at some gigabytes a second
_LONG: Final = 64 * 1024
_KEPT: Final = 1024  # of a string's beginning and of its end
_MOST_QUOTES: Final = 1000

Bytes = bytes | bytearray


class Outline:
    """`text` is the outline; `restored` gives back what was cut."""

    def __init__(self, body: Bytes, cuts: list[tuple[int, int]]) -> None:
        self._body = body
        self._cuts = cuts
        self._mark = os.urandom(8).hex().encode()  # nobody can guess it
        pieces, start = list[Bytes](), 0
        for number, (first, last) in enumerate(cuts):
            pieces += (body[start:first], b"%b-%d-" % (self._mark, number))
            start = last
        self.text: Bytes = b"".join((*pieces, body[start:])) if cuts else body

    @classmethod
    async def of(cls, body: Bytes) -> Outline:
        """The outline of probable JSON; of anything else, a text that is not JSON either."""
        return cls(body, await _cuts(body))

    async def restored(self, text: Bytes) -> Bytes:
        """`text` (the outline or a changed one) with its marks replaced by the cut parts."""
        if not self._cuts:
            return text
        whole, rest = bytearray(), memoryview(self._body)
        parts = re.split(rb"%b-(\d+)-" % self._mark, text)
        for outlined, number in zip(parts[::2], [*parts[1::2], None], strict=True):
            whole += outlined
            if number is not None:
                first, last = self._cuts[int(number)]
                for start in range(first, last, _SLICE):
                    whole += rest[start : min(start + _SLICE, last)]
                    await asyncio.sleep(0)
        return whole


async def _cuts(body: Bytes) -> list[tuple[int, int]]:
    """The ranges to cut; none where there are too many strings to go through them one by one."""
    cuts = list[tuple[int, int]]()
    opening = None
    quote = -1
    for _ in range(_MOST_QUOTES):
        quote = await _find(body, b'"', quote + 1)
        if quote < 0:
            return cuts
        if opening is None:
            opening = quote
            continue
        before = body[max(opening + 1, quote - _KEPT) : quote]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes == _KEPT:
            break  # nobody writes that, and counting them takes long
        if backslashes % 2 == 0:
            if quote - opening > _LONG:
                first, last = _boundary(body, opening + _KEPT), _boundary(body, quote - _KEPT)
                # An escape may begin six bytes before the cut.
                if await _find(body, b"\\", first - 6, last) < 0 and await _find(body, b":", first, last) < 0:
                    cuts.append((first, last))
            opening = None
    return []


def _boundary(body: Bytes, at: int) -> int:
    """`at`, or where the UTF-8 character ends that it is within."""
    for _ in range(3):
        at += body[at] & 0xC0 == 0x80
    return at


async def _find(body: Bytes, byte: bytes, start: int, end: int | None = None) -> int:
    """As `bytes.find`."""
    end = len(body) if end is None else end
    while start < end:
        found = body.find(byte, start, min(start + _SLICE, end))
        if found >= 0:
            return found
        start += _SLICE
        await asyncio.sleep(0)
    return -1
