"""Condensed JSON of a large body: the same JSON with long parts cut out, so that parsing is fast.

Long strings keep their beginning, long lists of numbers their ends, long runs of blanks one blank. The condensed text has a
limited number of values; a body with more is refused before it is parsed. A mark replaces each part that was cut out, until
the body is restored.

A mark shows whether the part can be plain base64: `media` refuses anything else in a field that makes a worker load something.
No key can hide in a cut part, because each part is within one string, or between two commas of a list.

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
"""Bytes of a body that is parsed in a millisecond or two: such a body is not condensed."""
MOST_VALUES: Final = 100_000
"""Limit of the strings, commas and opening brackets in condensed JSON: decoding these takes some 10 ms."""
_SLICE: Final = 128 * 1024  # bytes processed between two turns of the loop: a millisecond
_STRING_WORK: Final = 256  # a string takes as much time as this many bytes
_BYTES_PER_VALUE: Final = 64  # this many bytes of condensed JSON count as a value
_ESCAPES_PER_VALUE: Final = 8  # this many backslashes of a short string count as a value: they are slow to decode
_LONG_BYTES: Final = 128
_KEPT_BYTES: Final = 64  # bytes at the beginning of a long string
_FIRST_LOOK: Final = 256  # bytes; the search for a string's end begins with this many, then takes larger pieces
_MOST_DIGITS: Final = 100  # the time to read a number grows with the square of its length

_NO_VALUES: Final = bytes(set(range(256)) - set(b",[{"))
_BLANK: Final = b" \t\r\n"
_LIST: Final = b'"data:'  # the mark of a list begins like a data URL, because numbers are no references
_BACKSLASH: Final = ord("\\")
_KINDS: Final = bytes(ord("n" if c in b"-+0123456789.eE" else "_" if c in b", \t\r\n" else "x") for c in range(256))
_BLANKS: Final = bytes.maketrans(b"\t\r\n", b"   ")
_MIN_RUN: Final = 64  # bytes of numbers and blanks, at least
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\" + _BLANK
_WHOLE_ESCAPES: Final = re.compile(
    rb"(?:[^\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+", re.DOTALL
)
"""Text that ends neither within an escape nor between the two escapes of a surrogate pair."""

_MARK: Final = re.compile(rb'[0-9a-f]{16}-[0-9]+-:?"')

Bytes = bytes | bytearray


def may_be_cut(text: Bytes | msgspec.Raw) -> bool:
    """May this JSON have marks for parts that were cut out, so that only the restored JSON may be shown to people?"""
    found = bytes(text)
    return (b'-"' in found or b'-:"' in found) and _MARK.search(found) is not None


class CondensedJson:
    """`text` is the condensed JSON; `restored` puts the cut parts back."""

    def __init__(self) -> None:
        self.text: Bytes = bytearray()
        self._body: Bytes = b""
        self._source: Bytes | Part = b""
        self._cuts = list[tuple[Bytes | Part, int, int, bool]]()  # source, begin, end, is a list
        self._values = 0
        self._work = 0

    @cached_property
    def _mark_prefix(self) -> bytes:
        return os.urandom(8).hex().encode() + b"-"  # nobody can guess it

    @classmethod
    async def of(cls, body: Bytes) -> CondensedJson:
        """Condense a body that is probably JSON. The result is JSON only if the body is.

        Raises InvalidRequestError for a body of too many values.
        """
        condensed = cls()
        await condensed.add(body)
        return condensed

    async def add(self, body: Bytes, source: Part | None = None) -> Bytes:
        """Condense another body. Both bodies count for one limit; the cut parts of this one are restored from `source`.

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
                await self._count_work(stop - at)
                at = stop
                continue
            closing = await self._find_closing_quote(quote)
            if closing < 0:
                self.text += b'"'
                break
            self._values += 1 + min(closing - quote, _LONG_BYTES) // _BYTES_PER_VALUE
            if closing - quote <= _LONG_BYTES:
                self.text += body[quote : closing + 1]
                self._values += body.count(b"\\", quote, closing) // _ESCAPES_PER_VALUE
            else:
                await self._add_long_string(quote, closing)
            at = closing + 1
            await self._count_work(_STRING_WORK)
        self.text, self._body = bytes(self.text), b""
        return self.text

    def mark(self, content: Bytes) -> str:
        """A mark for `content` that is not from the body, for the end of a string. The content must need no escapes."""
        self._cuts.append((content, 0, len(content), False))
        return f"{self._mark_prefix.decode()}{len(self._cuts) - 1}-"

    async def restored(self, text: Bytes) -> Bytes:
        """`text` (the condensed JSON, possibly changed) with its marks replaced by the cut parts."""
        if not self._cuts:
            return text
        whole = bytearray()
        async for part in self._restored_parts(text):
            whole += part
        return whole

    async def pieces(self, text: Bytes) -> AsyncIterator[bytes]:
        """As `restored`, in pieces of about 128 KiB. Raises UnavailableError if a source can't be read."""
        whole = bytearray()
        async for part in self._restored_parts(text):
            whole += part
            if len(whole) >= _SLICE:
                yield bytes(whole)
                whole.clear()
        if whole:
            yield bytes(whole)

    async def _restored_parts(self, text: Bytes) -> AsyncIterator[Bytes]:
        """As `restored`, part by part.

        A string of `text` may itself contain condensed JSON, such as the arguments of a tool call: there the quote after a mark
        is escaped, and so the restored part is escaped, too.
        """
        mark = self._mark_prefix
        at = 0
        while (found := text.find(mark, at)) >= 0:
            digits = found + len(mark)
            end = text.index(b"-", digits)
            source, first, last, is_list = self._cuts[int(text[digits:end])]
            at_quote = end + 1 + (not is_list and text[end + 1 : end + 2] == b":")
            is_quoted = text.startswith(b'\\"', at_quote)
            async for part in self._slices(text, at, found - is_list * (len(_LIST) + is_quoted)):
                yield part
            for start in range(first, last, _SLICE):
                stop = min(start + _SLICE, last)
                part = await source.read(start, stop) if isinstance(source, Part) else source[start:stop]
                yield _escape(part) if is_quoted else part
                await self._count_work(_SLICE)
            at = at_quote + is_list * (1 + is_quoted)
            await self._count_work(_STRING_WORK)
        async for part in self._slices(text, at, len(text)):
            yield part

    async def _slices(self, text: Bytes, first: int, last: int) -> AsyncIterator[Bytes]:
        for start in range(first, last, _SLICE):
            stop = min(start + _SLICE, last)
            yield text[start:stop]
            await self._count_work(stop - start)

    async def _count_work(self, size: int) -> None:
        """Count work, and let other tasks run after each slice of it."""
        self._work += size
        if self._work >= _SLICE:
            self._work = 0
            await asyncio.sleep(0)

    def _add_cut(self, first: int, last: int, *, is_list: bool = False) -> bytes:
        self._cuts.append((self._source, first, last, is_list))
        return b"%b%d-" % (self._mark_prefix, len(self._cuts) - 1)

    def _add_structure(self, at: int, end: int) -> None:
        """Add the text between two strings, without most of its numbers and blanks."""
        text: Bytes = self._body[at:end]
        if len(text) > _LONG_BYTES:
            text = self._shorten_numbers(text, at)
        self._values += len(text.translate(None, _NO_VALUES)) + len(text) // _BYTES_PER_VALUE
        self.text += text

    def _shorten_numbers(self, text: Bytes, at: int) -> Bytes:
        """`text`, which begins at `at` in the body, without most of its numbers and blanks."""
        kinds = text.translate(_KINDS)
        if b"n" * (_MOST_DIGITS + 1) in kinds:
            raise InvalidRequestError(
                f"A number in the request body has more than {_MOST_DIGITS} digits.", code="too_many_values"
            )
        kinds = kinds.replace(b"n", b"_")
        thin, done = bytearray(), 0
        while (start := kinds.find(b"_" * _MIN_RUN, done)) >= 0:
            end = kinds.find(b"x", start)
            end = len(text) if end < 0 else end
            first, last = text.find(b",", start, end) + 1, text.rfind(b",", start, end)
            if 0 < first < last:
                thin += (
                    text[done:first]
                    + _LIST
                    + self._add_cut(at + first, at + last, is_list=True)
                    + b'"'
                    + text[last:end]
                )
            else:
                thin += text[done:start] + b" ".join(text[start:end].split())
            done = end
        return thin + text[done:]

    async def _find_closing_quote(self, quote: int) -> int:
        """The position of the closing quote of the string that begins at `quote`; -1 without one."""
        body, at, size = self._body, quote + 1, _FIRST_LOOK
        while at < len(body):
            stop = min(at + size, len(body))
            found = body.find(b'"', at, stop)
            if body[(found if found >= 0 else stop) - 1] == _BACKSLASH:
                piece = body[at:stop].replace(b"\\\\", b"__").replace(b'\\"', b"__")
                found = piece.find(b'"')
                found = found if found < 0 else at + found
                if piece.endswith(b"\\") and stop < len(body):
                    stop -= 1  # don't split an escape
            if found >= 0:
                return found
            await self._count_work(stop - at)
            at, size = stop, min(4 * size, _SLICE)
        return -1

    async def _add_long_string(self, quote: int, closing: int) -> None:
        """Add the beginning of a long string and a mark. The mark has a colon unless the whole cut part can be base64."""
        body, first = self._body, quote + 1 + _KEPT_BYTES
        if b"\\" in body[quote:first]:
            found = _WHOLE_ESCAPES.match(body, quote + 1, first)
            assert found is not None  # the pattern also matches an empty text
            first = found.end()
        for _ in range(3):
            first += body[first] & 0xC0 == 0x80  # don't split a UTF-8 character
        self.text += body[quote:first] + self._add_cut(first, closing)
        at, size = first, _FIRST_LOOK
        while at < closing and body[quote + 1 : quote + 6].lower() != b"data:":
            part = body[at : min(at + size, closing)]
            if part.translate(None, _BASE64) or b"\\u" in part or part.endswith(b"\\"):
                self.text += b":"
                break
            await self._count_work(len(part))
            at, size = at + size, min(4 * size, _SLICE)
        self.text += b'"'


def _escape(part: Bytes) -> Bytes:
    """A part of a JSON text, escaped for a JSON string. The only control characters in a JSON text are blanks."""
    return part.translate(_BLANKS).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
