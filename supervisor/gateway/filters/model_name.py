"""Puts the model's name that a client asked for into answers with another name.

A public name stands for a model whose worker has a name of its own, and writes that into its answers. Answers are not
parsed for it: `"model":"its-name"` is replaced where it stands. Text that a model generated can't look like that, because
quotes within a JSON string are escaped. The arguments of a tool can, in Anthropic's whole answers: so in those, and in every
other answer that isn't a stream, only the outermost `model` is replaced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.filters.filters import STREAMS, Filter, Head, Use

_TYPES: Final = (b"application/json", *STREAMS)
_WHOLE_LIMIT: Final = 1024 * 1024  # what is larger is pictures or sound
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Renaming(NamedTuple):
    """A name and its replacement, in both ways to write the field: with and without a space after the colon."""

    found: tuple[bytes, bytes]
    put: tuple[bytes, bytes]

    def of(self, piece: bytes) -> bytes:
        """`piece` with the asked name."""
        return piece.replace(self.found[0], self.put[0]).replace(self.found[1], self.put[1])

    def of_whole(self, body: bytes) -> bytes:
        """A whole answer with the asked name."""
        try:
            fields = _fields(body)
        except UNREADABLE:
            return self.of(body)
        name = fields.get("model")
        if name is None or b'"model":' + bytes(name) != self.found[0]:
            return body
        fields["model"] = msgspec.Raw(self.put[0].removeprefix(b'"model":'))
        return msgspec.json.encode(fields)

    def begun(self, piece: bytes) -> int:
        """How many bytes at the end of `piece` may be the beginning of the field."""
        if piece.endswith((b"\n", b"}")):
            return 0
        longest = min(len(piece), len(self.found[1]) - 1)
        return next((size for size in range(longest, 0, -1) if self._begins_with(piece[-size:])), 0)

    def _begins_with(self, end: bytes) -> bool:
        return any(found.startswith(end) for found in self.found)


@lru_cache(1024)
def renaming(worker_name: str, requested_name: str) -> Renaming:
    """The replacement of the worker's name `worker_name` by `requested_name`."""
    found, put = (msgspec.json.encode(name) for name in (worker_name, requested_name))
    return Renaming((b'"model":' + found, b'"model": ' + found), (b'"model":' + put, b'"model": ' + put))


class Rename(Filter):
    """Puts the asked name into an answer."""

    def __init__(self, names: Renaming) -> None:
        self._names = names
        self._is_whole = False  # no stream: it is kept, as long as it isn't large
        self._begun = b""  # of a piece that ended within what is replaced

    def head(self, head: Head) -> Use:
        """See Filter."""
        if head.is_encoded or not head.content_type.startswith(_TYPES):
            return Use.NONE
        self._is_whole = head.content_type.partition(b";")[0].strip() == _TYPES[0]
        head.changes_body()  # another name may be longer
        return Use.PIECES

    def feed(self, piece: bytes) -> bytes:
        """See Filter."""
        piece = self._begun + piece
        self._is_whole = self._is_whole and len(piece) <= _WHOLE_LIMIT
        if not self._is_whole:
            piece = self._names.of(piece)
        begun = len(piece) if self._is_whole else self._names.begun(piece)
        self._begun = piece[len(piece) - begun :]
        return piece[: len(piece) - begun]

    def end(self) -> bytes:
        """See Filter."""
        return self._names.of_whole(self._begun) if self._is_whole else self._names.of(self._begun)
