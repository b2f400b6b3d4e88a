"""The data path: sends one admitted request to a worker and its response back. Pure ASGI.

Bodies are not parsed on their way: the last few pieces are kept, and `Outcome` looks for token counts in them on demand.
The exception: a worker's error responses are converted to the dialect's shape. A response that broke off never looks
complete: the last event or line of a stream is the error, and of everything else the connection is cut
(`ResponseBrokenError`). A stream's connection is not: clients such as aiohttp would report that instead of the error.

Disconnects are not watched here: the caller wraps admission and forwarding in one `CancelOnDisconnect`, whose cancellation
closes the worker's connection at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from supervisor.errors import LlmuxError
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.disconnect import ResponseBrokenError, Scope, Send
from supervisor.gateway.error_response import error_event
from supervisor.gateway.filters.filters import EVENTS, STREAMS, Filter, FilteredResponse, filtered
from supervisor.gateway.filters.translation import CANONICAL, called, ignored_header
from supervisor.gateway.stream_end import TAIL_BYTES, StreamFailedError, StreamJudge
from supervisor.gateway.upstream_error import WorkerAnswerError, error_answer, restated, worker_error
from supervisor.io.held_body import Gathered, HeldBody
from supervisor.io.upstream import Body, Headers, Upstream, UpstreamResponse

ERROR_LIMIT: Final = 64 * 1024
TAIL_PIECES: Final = 16  # enough for the finish, comments, the usage and `[DONE]`
JOINED_BYTES: Final = 512  # of small pieces, which count as one: however reads split them

_IGNORED: Final = b"x-llmux-ignored"
_NOT_FOR_CLIENTS: Final = frozenset((b"server", b"date", b"x-request-id", b"openai-processing-ms", _IGNORED))
_STREAM_REPLACED: Final = _NOT_FOR_CLIENTS | {b"content-length", b"x-accel-buffering"}
_CORS: Final = b"access-control-"
_BODILESS: Final = (204, 304)

_TOKENS: Final = b'_tokens"'
_COUNT: Final = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,15})\b')
# llama.cpp's own figures: all that a stream ends with whose client didn't ask for its usage.
_TIMINGS: Final = b'"timings"'
_TIMED: Final = re.compile(rb'"(cache|prompt|predicted)_n"\s*:\s*(\d{1,15})\b')
_CACHE: Final = b'"cache'
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|cache_n)"\s*:\s*(\d{1,15})\b')


class Usage(NamedTuple):
    """Tokens, from the response's own usage; None without one."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None  # of the prompt's


NO_USAGE: Final = Usage()


def _timed(tail: bytes) -> Usage:
    start = tail.rfind(_TIMINGS)
    if start < 0:
        return NO_USAGE
    counts = {kind: int(number) for kind, number in _TIMED.findall(tail, start)}
    prompt = counts.get(b"prompt")
    cached = counts.get(b"cache")
    return Usage(prompt if prompt is None else prompt + (cached or 0), counts.get(b"predicted"), cached)


@dataclass(slots=True)
class Outcome:
    """The result of a forwarded request, updated as it runs, so it is correct after a cancellation, too."""

    status: int = 0  # 0: no answer came
    bytes_sent: int = 0  # of the body
    first_byte_s: float | None = None  # from sending the request to the first piece of the body
    first_byte_at: float | None = None  # loop time; as well
    error: str | None = None  # the code of what broke it off; the exception would keep the frames that it passed
    error_status: int = 0  # of that
    error_message: str | None = None  # of that, or of the worker's error response
    started: bool = False  # the client has the response's head
    stream_type: bytes = b""  # the content type of a stream whose client takes an error as its last event
    ignored: Sequence[str] = ()  # fields of the request that have no effect, as who answers says
    canonical: deque[bytes] | None = None  # the end of what was translated, where the worker's usage stands
    _head: bytes = b""  # of the body: Anthropic's streams begin with the prompt's tokens
    _tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_PIECES))

    def usage(self) -> Usage:
        """The usage at the end of the response. Each call searches for it."""
        tail = self.tail() if self.canonical is None else b"".join(self.canonical)
        if self.bytes_sent > len(tail) and _TOKENS in self._head:
            tail = self._head + tail
        start = tail.find(_TOKENS)
        if start < 0:
            return _timed(tail)
        counts = {kind: int(number) for kind, number in _COUNT.findall(tail, max(0, start - len(b'"completion')))}
        if not counts:  # it was another field, such as `max_tokens`
            return _timed(tail)
        cached = _CACHED.findall(tail) if _CACHE in tail else None
        return Usage(
            counts.get(b"prompt", counts.get(b"input")),
            counts.get(b"completion", counts.get(b"output")),
            int(cached[-1]) if cached else None,
        )

    def keep(self, chunk: bytes) -> None:
        """Count a piece of the body, and remember its end."""
        size = len(chunk)
        if not self.bytes_sent:
            self._head = chunk[:TAIL_BYTES]
        self.bytes_sent += size
        if self._tail and size + len(self._tail[-1]) <= JOINED_BYTES:
            self._tail[-1] += chunk
        else:
            self._tail.append(chunk if size <= TAIL_BYTES else chunk[-TAIL_BYTES:])

    def tail(self) -> bytes:
        """The end of what was sent."""
        return b"".join(self._tail)


def _never(_error: WorkerAnswerError) -> bool:
    return False


async def forward(
    scope: Scope,
    send: Send,
    outcome: Outcome,
    *,
    upstream: Upstream,
    target: bytes,
    headers: Headers,
    body: Body,
    dialect: Dialect,
    filters: Sequence[Filter] = (),
    gathered: Gathered | None = None,
    as_called: Mapping[str, str] = CANONICAL,
    request_id: bytes,
    extra_headers: Sequence[tuple[bytes, bytes]] = (),
    ignored: Sequence[str] = (),
    arrived_at: float | None = None,
    sse_started: bool = False,
    first_byte_s: float | None = None,
    explain: Callable[[LlmuxError], Awaitable[LlmuxError]] | None = None,
    raises: Callable[[WorkerAnswerError], bool] = _never,
    mend: Callable[[WorkerAnswerError], Awaitable[bool]] | None = None,
    end: re.Pattern[bytes] | None = None,
) -> bool:
    """Send the request in `scope` with `body` to `upstream` and pass the answer on through `send`.

    `target` is the worker's path and query as they go on the wire, `headers` are what it gets of the client's. `extra_headers` are added to the response, as is
    `x-request-id`; `arrived_at`, in loop time, adds `openai-processing-ms`. `x-llmux-ignored` names the fields in `ignored`,
    and those that the worker's header names, as the client calls them (`as_called`, see `AnswerTranslation.names`). With
    `sse_started` the response's head was sent already (see `Keepalive`). `explain` may say more about what broke a stream off.
    `gathered` counts what `filters` keep of the answer, and bounds it.

    While it has sent nothing itself, raises an LlmuxError for the caller to render: UpstreamError, UpstreamTimeoutError, and
    the worker's error, with `sse_started` or where `raises` says so. Later, see `break_off`. Returns true, and has sent
    nothing, where the worker refuses the request and `mend` says that it can be sent again, changed.
    Cancellation closes the worker's connection.
    """
    started_at = upstream.loop.time()
    response: UpstreamResponse = await upstream.request(
        scope["method"],
        target,
        [*headers, (b"x-request-id", request_id)],
        body,
        first_byte_s=first_byte_s,
    )
    try:
        if response.status < 400 and isinstance(body, HeldBody):
            body.release()
        content_type = _header(response.headers, b"content-type")
        has_events = content_type.startswith(EVENTS)
        own = [(b"x-request-id", request_id), *extra_headers]
        theirs = [
            name.decode("latin-1") for part in _header(response.headers, _IGNORED).split(b",") if (name := part.strip())
        ]
        if ignored or theirs:
            outcome.ignored = called(theirs, as_called)
            own.append((_IGNORED, ignored_header((*ignored, *outcome.ignored)).encode()))
        if filters and (has_events or not sse_started):
            response = await filtered(response, filters, gathered or Gathered())
            content_type = _header(response.headers, b"content-type")
            if isinstance(response, FilteredResponse) and response.is_translated:
                outcome.canonical = response.worker_tail
        outcome.status = response.status
        if arrived_at is not None:
            own.append(processing_ms(arrived_at, upstream.loop.time()))
        if sse_started and (response.status >= 400 or not has_events):
            status, data = restated(response.status, await response.read(ERROR_LIMIT))
            error = worker_error(status, content_type, data)
            if mend is not None and await mend(error):
                return True
            raise error
        if response.status >= 400 and not has_events and not _encoded(response.headers) and scope["method"] != "HEAD":
            return await _send_error(
                send,
                response,
                content_type,
                own,
                outcome,
                dialect,
                as_called,
                raises=raises,
                mend=mend,
            )
        if not sse_started:
            answer_head = response_headers(
                response.headers,
                own,
                is_stream=content_type.startswith(STREAMS),
                is_bodiless=response.status in _BODILESS,
            )
            await send({"type": "http.response.start", "status": response.status, "headers": answer_head})
        outcome.started = True
        if content_type.startswith(STREAMS) and not _encoded(response.headers):
            outcome.stream_type = content_type
        try:
            judge = StreamJudge(end, outcome.tail) if end is not None and has_events and outcome.stream_type else None
            await _send_body(send, response, outcome, started_at, upstream, judge)
        except LlmuxError as error:
            # Not kept in a variable: its traceback has this frame, and they would keep each other.
            await break_off(send, outcome, error if explain is None else await explain(error), dialect)
    finally:
        response.close()
    return False


async def break_off(send: Send, outcome: Outcome, error: LlmuxError, dialect: Dialect) -> None:
    """End a response that has begun and can't be completed: a stream with the error.

    Raises ResponseBrokenError for everything else, after which nobody may send.
    """
    outcome.error, outcome.error_status, outcome.error_message = error.code, int(error.status), error.message
    if not outcome.stream_type:
        raise ResponseBrokenError(error.message) from error
    is_told = isinstance(error, StreamFailedError)
    event = b"" if is_told else error_event(error, dialect, outcome.tail(), outcome.stream_type)
    await send({"type": "http.response.body", "body": event, "more_body": False})


async def _send_body(
    send: Send,
    response: UpstreamResponse,
    outcome: Outcome,
    started_at: float,
    upstream: Upstream,
    judge: StreamJudge | None,
) -> None:
    chunk = await response.next_chunk()
    outcome.first_byte_at = upstream.loop.time()
    outcome.first_byte_s = outcome.first_byte_at - started_at
    while True:
        is_last, error = response.drained, None
        if judge is not None:
            chunk, error = judge.passed(chunk, is_last)
        outcome.keep(chunk)
        # Where the end came with this piece, one message instead of two.
        await send({"type": "http.response.body", "body": chunk, "more_body": error is not None or not is_last})
        if error is not None:
            raise error
        if is_last:
            return
        chunk = await response.next_chunk()


async def _send_error(
    send: Send,
    response: UpstreamResponse,
    content_type: bytes,
    own: Headers,
    outcome: Outcome,
    dialect: Dialect,
    as_called: Mapping[str, str],
    *,
    raises: Callable[[WorkerAnswerError], bool],
    mend: Callable[[WorkerAnswerError], Awaitable[bool]] | None,
) -> bool:
    """Forward an error response: unchanged if it has the dialect's shape, otherwise converted to it. True: see `mend`."""
    data = await response.read(ERROR_LIMIT)
    headers = response_headers(response.headers, own, is_stream=False)
    outcome.status, said = restated(response.status, data)
    error = worker_error(outcome.status, content_type, said)
    if raises(error):
        raise error
    if mend is not None and await mend(error):
        return True
    outcome.error_message = error.message
    rendered = error_answer(outcome.status, content_type, said, dialect, as_called)
    if rendered is not data:
        data = rendered
        replaced = (b"content-type", b"content-length", b"etag")
        headers = [item for item in headers if item[0] not in replaced]
        headers += ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(data)))
    outcome.keep(data)
    await send({"type": "http.response.start", "status": outcome.status, "headers": headers})
    outcome.started = True
    await send({"type": "http.response.body", "body": data, "more_body": False})
    return False


def processing_ms(arrived_at: float, now: float) -> tuple[bytes, bytes]:
    """OpenAI's header for the time that the client waited for the response's headers."""
    return (b"openai-processing-ms", b"%d" % round((now - arrived_at) * 1000))  # the loop's clock has whole ones


def response_headers(headers: Headers, own: Headers, *, is_stream: bool, is_bodiless: bool = False) -> Headers:
    """The worker's headers as the client gets them: without its CORS policy, Server and Date, and with ours.

    What has no body has no length: whatever the worker says of one, it never comes.
    """
    dropped = _STREAM_REPLACED if is_stream or is_bodiless else _NOT_FOR_CLIENTS
    kept = [item for item in headers if item[0] not in dropped and not item[0].startswith(_CORS)]
    if is_stream:
        kept.append((b"x-accel-buffering", b"no"))
        if not _header(headers, b"cache-control"):
            kept.append((b"cache-control", b"no-cache"))
    kept += own
    return kept


def _header(headers: Headers, name: bytes) -> bytes:
    for key, value in headers:
        if key == name:
            return value
    return b""


def _encoded(headers: Headers) -> bool:
    return _header(headers, b"content-encoding") not in (b"", b"identity")
