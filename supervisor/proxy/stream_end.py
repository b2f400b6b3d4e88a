"""Whether a worker's stream of events is complete, judged when it ends, by what its API says at the end of each.

A stream that isn't never looks so: its client gets an error instead of the end, and its request counts as failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from supervisor.errors import LlmuxError, UpstreamError
from supervisor.proxy.upstream_error import WorkerAnswerError, restated, worker_error

DONE: Final = b"[DONE]"
INCOMPLETE: Final = "The worker ended its answer without saying that it is complete."
_DONE_LINE: Final = re.compile(rb"(?:\A|(?<=[\r\n]))data: ?\[DONE\]")
_DONE_LINES: Final = (b"data: [DONE]", b"data:[DONE]")
_ABORTED: Final = frozenset(("abort", "error"))  # reasons of SGLang and vLLM
_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"(?!"|abort"|error")')
_FAILED: Final = re.compile(rb'"type"\s*:\s*"response\.failed"')
_STOPPED: Final = re.compile(rb'"stop"\s*:\s*true')
_ENDS: Final[Mapping[str, re.Pattern[bytes]]] = {
    "/chat/completions": _FINISHED,
    "/completions": _FINISHED,
    "/messages": re.compile(rb'"type"\s*:\s*"message_stop"'),
    "/responses": re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete)"'),
    "/completion": _STOPPED,
    "/infill": _STOPPED,
}
_EVENT: Final = re.compile(
    rb"(?:\A|(?<=\n))(?P<named>event: ?error\b[^\n]*\n)?(?P<field>data|error): ?(?P<data>\{[^\n]*)"
)
_STATUSES: Final = {"invalid_request_error": 400, "rate_limit_error": 429, "overloaded_error": 503}  # Anthropic's
_FIELDS: Final = msgspec.json.Decoder(dict[str, object]).decode


class StreamFailedError(UpstreamError):
    """A stream's client has got the error that its worker ended it with."""


class StreamEnd:
    """Of one path."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern

    def error_in(self, piece: bytes) -> tuple[bytes, LlmuxError] | None:
        """A worker's error that is an event of this piece, and what comes before it: it goes on in the client's own words."""
        if b"error" not in piece:
            return None
        for found in _EVENT.finditer(piece):
            is_error = found["named"] is not None or found["field"] == b"error"
            if not is_error and b'"error"' not in found["data"]:
                continue
            try:
                fields = _FIELDS(found["data"])
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                continue
            if error := fields.get("error") or (fields if is_error else None):
                return piece[: found.start()], failure(error)
        return None

    def is_in(self, text: bytes) -> bool:
        """Does it say that the answer is complete?"""
        return self._pattern.search(text) is not None

    def judge(self, tail: bytes, *, is_finished: bool = False) -> LlmuxError | None:
        """What is wrong with a stream that ends so. `is_finished`: it has said before that it is complete."""
        if self.error_in(tail) is not None or _FAILED.search(tail) is not None:
            return StreamFailedError("The worker ended its answer with an error.", code="upstream_error")
        return None if is_finished or self.is_in(tail) else UpstreamError(INCOMPLETE)


def is_reason(finish_reason: str | None) -> bool:
    """Does a chat's choice say so that it is complete?"""
    return bool(finish_reason) and finish_reason not in _ABORTED


def done_at(piece: bytes) -> int:
    """Where the line begins that tells clients to stop reading; -1: it isn't there."""
    found = _DONE_LINE.search(piece)
    return -1 if found is None else found.start()


def done_begun(piece: bytes) -> int:
    """How many bytes at its end may be the beginning of that line."""
    line = piece[max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1 :]
    return len(line) if any(each.startswith(line) for each in _DONE_LINES) else 0


def failure(error: object) -> WorkerAnswerError:
    """What a worker's stream says of its end, as an error answer would."""
    code, kind = (error.get("code"), error.get("type")) if isinstance(error, dict) else (None, None)
    status = _STATUSES.get(kind, 500) if isinstance(kind, str) else 500
    status = code if isinstance(code, int) and 400 <= code < 600 else status  # llama.cpp and vLLM put it there
    meant, body = restated(status, msgspec.json.encode({"error": error}))
    return worker_error(meant, b"application/json", body)


END_OF: Final[Mapping[str, StreamEnd]] = {
    version + path: StreamEnd(pattern) for path, pattern in _ENDS.items() for version in ("", "/v1")
}
"""How streams of a path end, where that is known."""
