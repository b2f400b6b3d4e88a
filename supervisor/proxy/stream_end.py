"""Whether a worker's stream of events is complete, judged when it ends, by what its API says at the end of each.

A stream that isn't never looks so: its client gets an error instead of the end, and its request counts as failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from supervisor.errors import LlmuxError, UpstreamError
from supervisor.proxy.upstream_error import restated, worker_error

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
_ERROR: Final = re.compile(
    rb'(?:\A|\n)(?:event: ?error\b[^\n]*\n(?:data: ?)?|error: ?|data: ?(?=\{\s*"error"\s*:\s*[{"]))'
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
        if b"error" not in piece or (found := _ERROR.search(piece)) is None:
            return None
        data = piece[found.end() :].partition(b"\n")[0]
        try:
            fields = _FIELDS(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None
        inner = fields.get("error", fields)
        code = inner.get("code") if isinstance(inner, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500  # llama.cpp and vLLM put it there
        body = msgspec.json.encode({"error": inner})
        return piece[: found.start()], worker_error(status, b"application/json", restated(status, body)[1])

    def judge(self, tail: bytes) -> LlmuxError | None:
        """What is wrong with a stream that ends so."""
        if _ERROR.search(tail) is not None:
            return StreamFailedError("The worker ended its answer with an error.", code="upstream_error")
        return None if self._pattern.search(tail) is not None else UpstreamError(INCOMPLETE, code="upstream_broken")


_BY_PATH: Final[Mapping[str, StreamEnd]] = {path: StreamEnd(pattern) for path, pattern in _ENDS.items()}


def end_of(path: str) -> StreamEnd | None:
    """How streams of this path end. None: nobody knows."""
    return _BY_PATH.get(path.removeprefix("/v1"))
