"""Replaces the worker's model name in answers by the name that the client requested.

A worker may write another name into its answers than the model's public name. A stream is not parsed: each
`"model":"its-name"` is replaced in the bytes. Text that a model generated can't contain these bytes, because quotes within a
JSON string are escaped. The arguments of a tool can, in Anthropic's whole answers: so in every answer that isn't a stream only
the outermost `model` is replaced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.filters.filters import STREAMS, Filter, Head, Use

_TYPES: Final = (b"application/json", *STREAMS)
_WHOLE_BYTES: Final = 1024 * 1024  # a larger answer has pictures or sound
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Renaming(NamedTuple):
    """A name and its replacement, in both spellings of the field: with and without a space after the colon."""

    found: tuple[bytes, bytes]
    put: tuple[bytes, bytes]

    def of(self, piece: bytes) -> bytes:
        """`piece` with the requested name."""
        return piece.replace(self.found[0], self.put[0]).replace(self.found[1], self.put[1])

    def of_whole(self, body: bytes) -> bytes:
        """A whole answer with the requested name."""
        try:
            fields = _fields(body)
        except UNREADABLE:
            return self.of(body)
        name = fields.get("model")
        if name is None or b'"model":' + bytes(name) != self.found[0]:
            return body
        fields["model"] = msgspec.Raw(self.put[0].removeprefix(b'"model":'))
        return msgspec.json.encode(fields)

    def open_length(self, piece: bytes) -> int:
        """The number of bytes at the end of `piece` that may be the beginning of the field."""
        if piece.endswith((b"\n", b"}")):
            return 0
        longest = min(len(piece), len(self.found[1]) - 1)
        return next((size for size in range(longest, 0, -1) if self._may_begin_with(piece[-size:])), 0)

    def _may_begin_with(self, end: bytes) -> bool:
        return any(found.startswith(end) for found in self.found)


@lru_cache(1024)
def renaming(worker_name: str, requested_name: str) -> Renaming:
    """The replacement of the worker's name `worker_name` by `requested_name`."""
    found, put = (msgspec.json.encode(name) for name in (worker_name, requested_name))
    return Renaming((b'"model":' + found, b'"model": ' + found), (b'"model":' + put, b'"model": ' + put))


class Rename(Filter):
    """Puts the requested name into an answer."""

    def __init__(self, names: Renaming) -> None:
        self._names = names
        self._is_whole = False  # no stream: the answer is kept, unless it is large
        self._pending = b""  # the end of a piece, possibly the beginning of the field

    def head(self, head: Head) -> Use:
        """See Filter."""
        if head.is_encoded or not head.content_type.startswith(_TYPES):
            return Use.NONE
        self._is_whole = head.content_type.partition(b";")[0].strip() == _TYPES[0]
        head.changes_body()  # the new name may have another length
        return Use.PIECES

    def feed(self, piece: bytes) -> bytes:
        """See Filter."""
        piece = self._pending + piece
        self._is_whole = self._is_whole and len(piece) <= _WHOLE_BYTES
        if not self._is_whole:
            piece = self._names.of(piece)
        kept = len(piece) if self._is_whole else self._names.open_length(piece)
        self._pending = piece[len(piece) - kept :]
        return piece[: len(piece) - kept]

    def end(self) -> bytes:
        """See Filter."""
        return self._names.of_whole(self._pending) if self._is_whole else self._names.of(self._pending)
