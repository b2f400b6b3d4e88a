"""Answers that can be changed only once they are complete."""

from __future__ import annotations

import abc
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.gateway.body.typed import UNREADABLE

ANSWER_LIMIT: Final = 4 * 1024 * 1024  # bytes; a longer answer passes unchanged
_fields: Final = msgspec.json.Decoder(Fields).decode


class BufferedResponse(abc.ABC):
    """A `StreamTranslation` that buffers a JSON answer until it is complete. Anything but a JSON object passes unchanged."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @abc.abstractmethod
    def changed(self, fields: Fields) -> Fields | None:
        """The new fields of the answer; None: it stays unchanged."""

    @property
    def gathered(self) -> int:
        """See StreamTranslation."""
        return len(self._buffer)

    def feed(self, piece: bytes) -> bytes:
        """Nothing yet, or the whole buffer once the answer is too long to buffer."""
        self._buffer += piece
        return self._take_buffer() if len(self._buffer) > ANSWER_LIMIT else b""

    def end(self) -> bytes:
        """The whole answer."""
        body = self._take_buffer()
        try:
            fields = self.changed(_fields(body))
        except UNREADABLE:
            return body
        return body if fields is None else msgspec.json.encode(fields)

    def _take_buffer(self) -> bytes:
        taken, self._buffer = bytes(self._buffer), bytearray()
        return taken
