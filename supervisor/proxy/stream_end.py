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

DONE: Final = b"data: [DONE]\n\n"
INCOMPLETE: Final = "The worker ended its answer without saying that it is complete."
_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_STOPPED: Final = re.compile(rb'"stop"\s*:\s*true')
_ENDS: Final[Mapping[str, re.Pattern[bytes]]] = {
    "/chat/completions": _FINISHED,
    "/completions": _FINISHED,
    "/messages": re.compile(rb'"type"\s*:\s*"message_stop"'),
    "/responses": re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete|failed)"'),
    "/completion": _STOPPED,
    "/infill": _STOPPED,
}
_EVENT: Final = re.compile(
    rb"(?:\A|(?<=\n))(?P<named>event: ?error\b[^\n]*\n)?(?P<field>data|error): ?(?P<data>\{[^\n]*)"
)
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

    def judge(self, tail: bytes) -> LlmuxError | None:
        """What is wrong with a stream that ends so."""
        if self.error_in(tail) is not None:
            return StreamFailedError("The worker ended its answer with an error.", code="upstream_error")
        return None if self._pattern.search(tail) is not None else UpstreamError(INCOMPLETE)


def failure(error: object) -> WorkerAnswerError:
    """What a worker's stream says of its end, as an error answer would."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500  # llama.cpp and vLLM put it there
    meant, body = restated(status, msgspec.json.encode({"error": error}))
    return worker_error(meant, b"application/json", body)


END_OF: Final[Mapping[str, StreamEnd]] = {
    version + path: StreamEnd(pattern) for path, pattern in _ENDS.items() for version in ("", "/v1")
}
"""How streams of a path end, where that is known."""
