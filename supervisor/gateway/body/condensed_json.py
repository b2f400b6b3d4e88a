"""The outline of a large body: the same JSON without most of its bulk, so that parsing it is fast.

Long strings keep their beginning, long lists of numbers their ends, long stretches of blanks one blank. What is left has a
bounded number of values; a body with more is refused before anything is built from it. A mark stands for each part that
was cut out, until the body is restored.

A mark shows whether the part can have been plain base64: `media` refuses anything else where something is loaded. No key
can hide in a cut part, because it is within one string, or between two commas of a list.

Other tasks run after each slice of work.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Final

import msgspec

from supervisor.errors import InvalidRequestError
from supervisor.host.store.response_store import Part

SMALL: Final = 64 * 1024
"""Bytes of any body that is parsed in a millisecond or two: it needs no outline."""
MOST_VALUES: Final = 100_000
"""Strings, commas and opening brackets of an outline: building the values of so many takes some 10 ms."""
_SLICE: Final = 128 * 1024  # bytes handled between two turns of the loop: a millisecond
_STRING: Final = 256  # a string costs as much time as so many bytes
_VALUE: Final = 64  # so many bytes of the outline count as a value
_ESCAPES: Final = 8  # as do so many backslashes of a short string: decoding them takes longer
_LONG: Final = 128
_KEPT: Final = 64  # of a long string
_FIRST_LOOK: Final = 256  # a string's end is looked for in pieces that grow from this
_MOST_DIGITS: Final = 100  # the time to read a number grows with the square of its length

_NO_VALUES: Final = bytes(set(range(256)) - set(b",[{"))
_BLANK: Final = b" \t\r\n"
_LIST: Final = b'"data:'  # the mark of a list begins like content, because numbers refer to nothing
_BACKSLASH: Final = ord("\\")
_KINDS: Final = bytes(ord("n" if c in b"-+0123456789.eE" else "_" if c in b", \t\r\n" else "x") for c in range(256))
_BLANKS: Final = bytes.maketrans(b"\t\r\n", b"   ")
_RUN: Final = 64  # bytes of numbers and blanks, at least
_PLAIN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\" + _BLANK
_UNSPLIT: Final = re.compile(
    rb"(?:[^\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+", re.DOTALL
)
"""Whole escapes, and both halves of a character that has two."""

_MARK: Final = re.compile(rb'[0-9a-f]{16}-[0-9]+-:?"')

Bytes = bytes | bytearray


def may_be_cut(text: Bytes | msgspec.Raw) -> bool:
    """May this JSON have marks for parts that were cut out, so that only the restored JSON may be shown?"""
    found = bytes(text)
    return (b'-"' in found or b'-:"' in found) and _MARK.search(found) is not None


class CondensedJson:
    """`text` is the outline; `restored` gives back what was cut."""

    def __init__(self) -> None:
        self.text: Bytes = bytearray()
        self._body: Bytes = b""
        self._source: Bytes | Part = b""
        self._cuts = list[tuple[Bytes | Part, int, int, bool]]()  # of what, from, to, is a list
        self._values = 0
        self._work = 0

    @cached_property
    def _mark(self) -> bytes:
        return os.urandom(8).hex().encode() + b"-"  # nobody can guess it

    @classmethod
    async def of(cls, body: Bytes) -> CondensedJson:
        """The outline of a body that is probably JSON. The outline of anything else is not JSON either.

        Raises InvalidRequestError for a body of too many values.
        """
        condensed = cls()
        await condensed.add(body)
        return condensed

    async def add(self, body: Bytes, source: Part | None = None) -> Bytes:
        """The outline of another body. Both count for one limit; the cut parts of this one come from `source` when they are restored.

        Raises InvalidRequestError.
        """
        self._body, self._source, self.text = body, source or body, bytearray()
        at, end = 0, len(body)
        while at < end:
            stop = min(at + _SLICE, end)
            quote = body.find(b'"', at, stop)
            self._add_structure(at, stop if quote < 0 else quote)
            if self._values > MOST_VALUES:
                raise InvalidRequestError(
                    f"The request body has more than {MOST_VALUES:,} values; long strings and lists of numbers count as one.",
                    code="too_many_values",
                )
            if quote < 0:
                await self._worked(stop - at)
                at = stop
                continue
            closing = await self._closing(quote)
            if closing < 0:
                self.text += b'"'
                break
            self._values += 1 + min(closing - quote, _LONG) // _VALUE
            if closing - quote <= _LONG:
                self.text += body[quote : closing + 1]
                self._values += body.count(b"\\", quote, closing) // _ESCAPES
            else:
                await self._add_long(quote, closing)
            at = closing + 1
            await self._worked(_STRING)
        self.text, self._body = bytes(self.text), b""
        return self.text

    def mark(self, content: Bytes) -> str:
        """A mark for `content` that was never in the body, for the end of a string. The content needs no escapes."""
        self._cuts.append((content, 0, len(content), False))
        return f"{self._mark.decode()}{len(self._cuts) - 1}-"

    async def restored(self, text: Bytes) -> Bytes:
        """`text` (the outline or a changed one) with its marks replaced by the cut parts."""
        if not self._cuts:
            return text
        whole = bytearray()
        async for part in self._parts(text):
            whole += part
        return whole

    async def pieces(self, text: Bytes) -> AsyncIterator[bytes]:
        """As `restored`, in pieces of about 128 KiB. Raises UnavailableError where a source can't be read."""
        whole = bytearray()
        async for part in self._parts(text):
            whole += part
            if len(whole) >= _SLICE:
                yield bytes(whole)
                whole.clear()
        if whole:
            yield bytes(whole)

    async def _parts(self, text: Bytes) -> AsyncIterator[Bytes]:
        """As `restored`, part by part.

        A string of `text` may itself hold JSON of the outline, such as the arguments of a tool call: there the quote that
        follows a mark is escaped, and so is the restored part.
        """
        mark = self._mark
        at = 0
        while (found := text.find(mark, at)) >= 0:
            digits = found + len(mark)
            end = text.index(b"-", digits)
            source, first, last, is_list = self._cuts[int(text[digits:end])]
            at_quote = end + 1 + (not is_list and text[end + 1 : end + 2] == b":")
            is_quoted = text.startswith(b'\\"', at_quote)
            async for part in self._sliced(text, at, found - is_list * (len(_LIST) + is_quoted)):
                yield part
            for start in range(first, last, _SLICE):
                stop = min(start + _SLICE, last)
                part = await source.read(start, stop) if isinstance(source, Part) else source[start:stop]
                yield _quoted(part) if is_quoted else part
                await self._worked(_SLICE)
            at = at_quote + is_list * (1 + is_quoted)
            await self._worked(_STRING)
        async for part in self._sliced(text, at, len(text)):
            yield part

    async def _sliced(self, text: Bytes, first: int, last: int) -> AsyncIterator[Bytes]:
        for start in range(first, last, _SLICE):
            stop = min(start + _SLICE, last)
            yield text[start:stop]
            await self._worked(stop - start)

    async def _worked(self, size: int) -> None:
        """Count work, and let other tasks run after each slice of it."""
        self._work += size
        if self._work >= _SLICE:
            self._work = 0
            await asyncio.sleep(0)

    def _cut(self, first: int, last: int, *, is_list: bool = False) -> bytes:
        self._cuts.append((self._source, first, last, is_list))
        return b"%b%d-" % (self._mark, len(self._cuts) - 1)

    def _add_structure(self, at: int, end: int) -> None:
        """Add the text between two strings, without most of its numbers and blanks."""
        text: Bytes = self._body[at:end]
        if len(text) > _LONG:
            text = self._thinned(text, at)
        self._values += len(text.translate(None, _NO_VALUES)) + len(text) // _VALUE
        self.text += text

    def _thinned(self, text: Bytes, at: int) -> Bytes:
        """`text`, which begins at `at` in the body, without most of its numbers and blanks."""
        kinds = text.translate(_KINDS)
        if b"n" * (_MOST_DIGITS + 1) in kinds:
            raise InvalidRequestError(
                f"A number in the request body has more than {_MOST_DIGITS} digits.", code="too_many_values"
            )
        kinds = kinds.replace(b"n", b"_")
        thin, done = bytearray(), 0
        while (start := kinds.find(b"_" * _RUN, done)) >= 0:
            end = kinds.find(b"x", start)
            end = len(text) if end < 0 else end
            first, last = text.find(b",", start, end) + 1, text.rfind(b",", start, end)
            if 0 < first < last:
                thin += (
                    text[done:first] + _LIST + self._cut(at + first, at + last, is_list=True) + b'"' + text[last:end]
                )
            else:
                thin += text[done:start] + b" ".join(text[start:end].split())
            done = end
        return thin + text[done:]

    async def _closing(self, quote: int) -> int:
        """Where the string that begins at `quote` ends; -1 if it doesn't end."""
        body, at, size = self._body, quote + 1, _FIRST_LOOK
        while at < len(body):
            stop = min(at + size, len(body))
            found = body.find(b'"', at, stop)
            if body[(found if found >= 0 else stop) - 1] == _BACKSLASH:
                piece = body[at:stop].replace(b"\\\\", b"__").replace(b'\\"', b"__")
                found = piece.find(b'"')
                found = found if found < 0 else at + found
                if piece.endswith(b"\\") and stop < len(body):
                    stop -= 1  # half an escape
            if found >= 0:
                return found
            await self._worked(stop - at)
            at, size = stop, min(4 * size, _SLICE)
        return -1

    async def _add_long(self, quote: int, closing: int) -> None:
        """Add the beginning of a long string and a mark. The mark has a colon unless the whole cut part can be base64."""
        body, first = self._body, quote + 1 + _KEPT
        if b"\\" in body[quote:first]:
            found = _UNSPLIT.match(body, quote + 1, first)
            assert found is not None  # it matches nothing as well
            first = found.end()
        for _ in range(3):
            first += body[first] & 0xC0 == 0x80  # within a UTF-8 character
        self.text += body[quote:first] + self._cut(first, closing)
        at, size = first, _FIRST_LOOK
        while at < closing and body[quote + 1 : quote + 6].lower() != b"data:":
            part = body[at : min(at + size, closing)]
            if part.translate(None, _PLAIN) or b"\\u" in part or part.endswith(b"\\"):
                self.text += b":"
                break
            await self._worked(len(part))
            at, size = at + size, min(4 * size, _SLICE)
        self.text += b'"'


def _quoted(part: Bytes) -> Bytes:
    """A part of a JSON text, as a part of a string. Control characters of a JSON text are blanks."""
    return part.translate(_BLANKS).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
