"""Checks at the end of a worker's event stream whether the stream is complete, by the last events that its API prescribes.

An incomplete stream never looks complete: its client gets an error instead of the end, and its request counts as failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from runtimes.endpoints import aliases_of
from supervisor.errors import LlmuxError, UpstreamError
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.filters.filters import TAIL_BYTES
from supervisor.gateway.upstream_error import WorkerAnswerError, restated, upstream_error

INCOMPLETE: Final = "The worker ended its answer without saying that it is complete."
_DONE_LINE: Final = re.compile(rb"(?:\A|(?<=[\r\n]))data: ?\[DONE\]")
_DONE_LINES: Final = (b"data: [DONE]", b"data:[DONE]")
_ABORTED: Final = frozenset(("abort", "error"))  # reasons of SGLang and vLLM
_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"(?!"|abort"|error")')
_FAILED: Final = re.compile(rb'"type"\s*:\s*"response\.failed"')
_STOPPED: Final = re.compile(rb'"stop"\s*:\s*true')
_ENDS: Final = {
    "/v1/chat/completions": _FINISHED,
    "/v1/completions": _FINISHED,
    "/v1/messages": re.compile(rb'"type"\s*:\s*"message_stop"'),
    "/v1/responses": re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete)"'),
    "/completion": _STOPPED,
    "/infill": _STOPPED,
}
END_OF: Final[Mapping[str, re.Pattern[bytes]]] = {
    each: end for path, end in _ENDS.items() for each in (path, *aliases_of(path))
}
"""Path → the pattern that matches the end of a complete stream, where known."""
_OVERLAP: Final = 64  # bytes; no match of these patterns is longer
_EVENT: Final = re.compile(
    rb"(?:\A|(?<=\n))(?P<named>event: ?error\b[^\n]*\n)?(?P<field>data|error): ?(?P<data>\{[^\n]*)"
)
_STATUSES: Final = {"invalid_request_error": 400, "rate_limit_error": 429, "overloaded_error": 503}  # Anthropic's
_decode_fields: Final = msgspec.json.Decoder(dict[str, object]).decode


class StreamFailedError(UpstreamError):
    """The worker ended its stream with an error, which the client has received."""


class StreamJudge:
    """Judges one stream while it passes, piece by piece."""

    __slots__ = ("_end", "_is_finished", "_pending")

    def __init__(self, end: re.Pattern[bytes]) -> None:
        """`end`: see `END_OF`."""
        self._end = end
        self._is_finished = False  # a large piece matched; the tail doesn't have all of such a piece
        self._pending = b""  # possibly the beginning of a `[DONE]` line, after which clients stop reading

    def passed(self, piece: bytes, is_last: bool, tail: Callable[[], bytes]) -> tuple[bytes, LlmuxError | None]:
        """The part of the next piece that passes, and the error that then ends the stream. `tail` returns the end of the passed bytes."""
        if self._pending:
            piece, self._pending = self._pending + piece, b""
        if len(piece) > TAIL_BYTES:
            self._is_finished |= self._end.search(tail()[-_OVERLAP:] + piece) is not None
        if is_last or b"error" in piece or b"[DONE]" in piece:
            if (found := _error_in(piece)) is not None:
                return found
            done = _DONE_LINE.search(piece)
            if is_last or done is not None:
                error = self._error_at_end(tail() + piece)
                return (piece if error is None or done is None else piece[: done.start()]), error
        elif not piece.endswith(b"\n"):
            line = piece[max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1 :]
            if line and any(done.startswith(line) for done in _DONE_LINES):
                piece, self._pending = piece[: -len(line)], line
        return piece, None

    def _error_at_end(self, tail: bytes) -> LlmuxError | None:
        """The error of a stream with this end; None for a complete stream."""
        if _error_in(tail) is not None or _FAILED.search(tail) is not None:
            return StreamFailedError("The worker ended its answer with an error.", code="upstream_error")
        return None if self._is_finished or self._end.search(tail) is not None else UpstreamError(INCOMPLETE)


def _error_in(piece: bytes) -> tuple[bytes, LlmuxError] | None:
    """If an event of this piece is a worker's error: the part before that event, and the error, for the client's own dialect."""
    if b"error" not in piece:
        return None
    for found in _EVENT.finditer(piece):
        is_error = found["named"] is not None or found["field"] == b"error"
        if not is_error and b'"error"' not in found["data"]:
            continue
        try:
            fields = _decode_fields(found["data"])
        except UNREADABLE:
            continue
        if error := fields.get("error") or (fields if is_error else None):
            return piece[: found.start()], failure(error)
    return None


def is_reason(finish_reason: str | None) -> bool:
    """Does this `finish_reason` mean that a choice is complete?"""
    return bool(finish_reason) and finish_reason not in _ABORTED


def failure(error: object) -> WorkerAnswerError:
    """An error at the end of a worker's stream, as the corresponding error answer."""
    code, kind = (error.get("code"), error.get("type")) if isinstance(error, dict) else (None, None)
    status = _STATUSES.get(kind, 500) if isinstance(kind, str) else 500
    status = (
        code if isinstance(code, int) and 400 <= code < 600 else status
    )  # the status, in llama.cpp's and vLLM's errors
    meant, body = restated(status, msgspec.json.encode({"error": error}))
    return upstream_error(meant, b"application/json", body)
