"""Answers that can be changed only once they are complete."""

from __future__ import annotations

import abc
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.gateway.body.typed import UNREADABLE

ANSWER_LIMIT: Final = 4 * 1024 * 1024  # a longer answer passes as it is
_fields: Final = msgspec.json.Decoder(Fields).decode


class BufferedResponse(abc.ABC):
    """A `StreamTranslation` that holds an answer in JSON until it is complete. Anything but an object passes unchanged."""

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
        """Nothing yet; or everything, once the answer is too long to be held."""
        self._buffer += piece
        return self._taken() if len(self._buffer) > ANSWER_LIMIT else b""

    def end(self) -> bytes:
        """The whole answer."""
        body = self._taken()
        try:
            fields = self.changed(_fields(body))
        except UNREADABLE:
            return body
        return body if fields is None else msgspec.json.encode(fields)

    def _taken(self) -> bytes:
        taken, self._buffer = bytes(self._buffer), bytearray()
        return taken
