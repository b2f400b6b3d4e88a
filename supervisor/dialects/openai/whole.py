"""An answer that a worker gives as a whole, with what it lacks put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from supervisor.errors import UpstreamError
from supervisor.gateway.filters.translation import CANONICAL, StreamTranslation

_encode: Final = msgspec.json.Encoder().encode
_object: Final = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class Completed:
    """See AnswerTranslation. `complete` changes the decoded answer in place; a strange one may make it raise as it likes."""

    complete: Callable[[dict[str, Any]], None]
    noun: str
    ignored: Sequence[str] = ()
    names: ClassVar[Mapping[str, str]] = CANONICAL
    content_type: bytes = b"application/json"
    stream_content_type: bytes = b"text/event-stream"

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        try:
            found = _object(body)
            self.complete(found)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise UpstreamError(f"The worker's answer is no {self.noun}.") from error
        return _encode(found)

    def stream(self) -> StreamTranslation:
        """There is none. Raises UpstreamError."""
        raise UpstreamError(f"The worker's answer is a stream, and no {self.noun}.")
