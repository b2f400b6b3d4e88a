"""Parses and writes streams of server-sent events: the common part of all translations of such streams."""

from __future__ import annotations

import abc
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from supervisor.errors import UpstreamError

EVENT_LIMIT: Final = 16 * 1024 * 1024
_FRAME: Final = b"\n\n"
_encode: Final = msgspec.json.Encoder().encode


def event(kind: str, fields: Mapping[str, object]) -> bytes:
    """A server-sent event with this name, which is also the first field, `type`, of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


class FrameStream(abc.ABC):
    """A `StreamTranslation` whose subclasses translate one frame at a time."""

    def __init__(self) -> None:
        self._rest = b""
        self._kept_bytes = 0  # see `keeps`

    @property
    def gathered(self) -> int:
        """See StreamTranslation."""
        return len(self._rest) + self._kept_bytes

    def keeps(self, text: str) -> None:
        """Count a text that the subclass keeps until the stream ends."""
        self._kept_bytes += sys.getsizeof(text)

    @abc.abstractmethod
    def frame(self, data: bytes) -> bytes:
        """The translation of one frame's data, possibly empty. Raises UpstreamError for data that can't be translated."""

    def feed(self, piece: bytes) -> bytes:
        """See StreamTranslation. If a frame fails, the output of the frames before it is returned first; the next call raises."""
        *frames, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(_FRAME)
        if len(self._rest) > EVENT_LIMIT:
            raise UpstreamError("The worker's stream has an event that is too large to be translated.")
        found = list[bytes]()
        for at, frame in enumerate(frames):
            try:
                found.append(self._translate_frame(frame))
            except UpstreamError:
                if not any(found):
                    raise
                self._rest = _FRAME.join((*frames[at:], self._rest))
                break
        return b"".join(found)

    def end(self) -> bytes:
        """See StreamTranslation."""
        rest, self._rest = self._rest, b""
        return b"".join(map(self._translate_frame, rest.split(_FRAME)))

    def _translate_frame(self, frame: bytes) -> bytes:
        data = b"\n".join(line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:"))
        return self.frame(data) if data else b""
