"""The data path: sends one admitted request to a worker and its response back. Pure ASGI.

Bodies are not parsed on their way: the last few chunks are kept, and `Outcome` searches them for token counts on demand.
The exception: a worker's error responses are converted to the dialect's shape. A response that broke off never looks
complete. A stream ends with the error as its last event or line, and its connection stays open: clients such as aiohttp
would report a cut connection instead of the error. The connection of any other response is cut (`ResponseBrokenError`).

This module doesn't watch for disconnects: the caller wraps admission and forwarding in one `CancelOnDisconnect`, whose
cancellation closes the worker's connection at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from supervisor.errors import LlmuxError
from supervisor.gateway.attempt import Outcome
from supervisor.gateway.disconnect import ResponseBrokenError
from supervisor.gateway.error_response import error_event
from supervisor.gateway.filters.filters import EVENTS, STREAMS, Filter, FilteredResponse, Head, filtered
from supervisor.gateway.filters.stream_end import StreamFailedError, StreamJudge
from supervisor.gateway.filters.translation import called, ignored_header
from supervisor.gateway.upstream_error import Refusal, WorkerAnswerError, error_answer, restated, upstream_error
from supervisor.host.store.request_buffer import Gathered
from supervisor.host.upstream.upstream import Headers, Upstream, UpstreamResponse

if TYPE_CHECKING:
    from supervisor.gateway.response_cycle import ResponseCycle

ERROR_LIMIT: Final = 64 * 1024

_IGNORED: Final = b"x-llmux-ignored"
_NOT_FOR_CLIENTS: Final = frozenset((b"server", b"date", b"x-request-id", b"openai-processing-ms", _IGNORED))
_STREAM_REPLACED: Final = _NOT_FOR_CLIENTS | {b"content-length", b"x-accel-buffering"}
_CORS: Final = b"access-control-"
_BODILESS: Final = (204, 304)
_UNCOMPRESSED: Final = (b"", b"identity")  # content encodings


async def forward(
    cycle: ResponseCycle,
    upstream: Upstream,
    filters: Sequence[Filter] = (),
    gathered: Gathered | None = None,
    *,
    first_byte_s: float | None = None,
) -> None:
    """Send the request's attempt to `upstream` and pass the answer on through the `filters`.

    `x-llmux-ignored` lists the fields without effect, from llmux and from the worker's header, by the client's names.
    `gathered` counts and limits the bytes that filters keep of the answer. Cancellation closes the worker's connection.

    Raises UpstreamError, UpstreamTimeoutError, or WorkerAnswerError with its `refusal`, before anything is sent to the client. If
    `outcome.started` is set, pass the LlmuxError to `break_off`.
    """
    request, send = cycle.request, cycle.send
    attempt = request.attempt
    outcome, body = attempt.outcome, attempt.body
    loop_time = upstream.loop.time
    started_at = loop_time()
    own = [(b"x-request-id", request.request_id), *attempt.own]
    method = cycle.scope["method"]
    response = await upstream.request(method, attempt.path, [*attempt.headers, own[0]], body, first_byte_s=first_byte_s)
    try:
        if response.status < 400:
            body.release()
        is_begun = cycle.is_begun
        content_type, encoding, ignored = _content_headers(response.headers)
        has_events = content_type.startswith(EVENTS)
        if attempt.ignored or ignored:
            names = [name.decode("latin-1") for part in ignored.split(b",") if (name := part.strip())]
            outcome.ignored = called(names, attempt.called)
            own.append((_IGNORED, ignored_header((*attempt.ignored, *outcome.ignored)).encode()))
        judge = None
        if attempt.end is not None and has_events and encoding in _UNCOMPRESSED:
            judge = StreamJudge(attempt.end)
        if filters and (has_events or not is_begun):
            response = await filtered(response, filters, gathered or Gathered(), judge)
            content_type, encoding, _ = _content_headers(response.headers)
            if isinstance(response, FilteredResponse):
                judge = None  # the filtered response uses it
                if response.is_translated:
                    outcome.worker_tail = response.worker_tail
        outcome.status = response.status
        own.append(processing_ms(request.arrived_at, loop_time()))
        is_encoded = encoding not in _UNCOMPRESSED
        if (is_begun and not has_events) or (
            response.status >= 400 and (is_begun or not (has_events or is_encoded or method == "HEAD"))
        ):
            raise await _read_refusal(response, content_type, own, outcome)
        is_stream = content_type.startswith(STREAMS)
        if not is_begun:
            head = response_headers(
                response.headers, own, is_stream=is_stream, is_bodiless=response.status in _BODILESS
            )
            await send({"type": "http.response.start", "status": response.status, "headers": head})
        outcome.started = True
        if is_stream and not is_encoded:
            outcome.stream_type = content_type
        chunk = await response.next_chunk()
        outcome.first_byte_at = loop_time()
        outcome.first_byte_s = outcome.first_byte_at - started_at
        while True:
            is_last, error = response.drained, None
            if judge is not None:
                chunk, error = judge.passed(chunk, is_last, outcome.tail)
            outcome.keep(chunk)
            # If this is the last chunk, one message instead of two.
            await send({"type": "http.response.body", "body": chunk, "more_body": error is not None or not is_last})
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame
            if is_last:
                return
            chunk = await response.next_chunk()
    finally:
        response.close()


async def _read_refusal(
    response: UpstreamResponse, content_type: bytes, own: Headers, outcome: Outcome
) -> WorkerAnswerError:
    data = await response.read(ERROR_LIMIT)
    outcome.status, restated_body = restated(response.status, data)
    error = upstream_error(outcome.status, content_type, restated_body)
    error.refusal = Refusal(response_headers(response.headers, own, is_stream=False), content_type, data, restated_body)
    return error


async def send_refusal(cycle: ResponseCycle, error: WorkerAnswerError, filters: Sequence[Filter]) -> None:
    """Forward a worker's error answer: unchanged if it has the dialect's shape, otherwise converted to it."""
    assert error.refusal is not None
    attempt = cycle.request.attempt
    headers, content_type, data, restated_body = error.refusal
    outcome = attempt.outcome
    outcome.error_message = error.message
    rendered = error_answer(outcome.status, content_type, restated_body, cycle.request.dialect, attempt.called)
    if rendered is not data:
        data, content_type = rendered, b"application/json"
        replaced = (b"content-type", b"content-length", b"etag")
        headers = [item for item in headers if item[0] not in replaced]
        headers += ((b"content-type", content_type), (b"content-length", b"%d" % len(data)))
    outcome.keep(data)
    for each in filters:
        if each.sees_errors:
            each.error(Head(outcome.status, headers), data)
    await cycle.send({"type": "http.response.start", "status": outcome.status, "headers": headers})
    outcome.started = True
    await cycle.send({"type": "http.response.body", "body": data, "more_body": False})


async def break_off(cycle: ResponseCycle, error: LlmuxError, filters: Sequence[Filter]) -> None:
    """End a response that has begun and can't be completed. A stream ends with the error.

    Raises ResponseBrokenError for any other response; nothing may be sent after that.
    """
    request = cycle.request
    outcome = request.attempt.outcome
    outcome.error, outcome.error_status, outcome.error_message = error.code, int(error.status), error.message
    content_type = outcome.stream_type
    if not outcome.started and cycle.keepalive is not None:
        content_type = cycle.keepalive.content_type
    if not content_type:
        raise ResponseBrokenError(error.message) from error
    is_sent = isinstance(error, StreamFailedError)
    event = b"" if is_sent else error_event(error, request.dialect, outcome.tail(), content_type)
    head = Head(int(error.status), [(b"content-type", content_type)])
    for each in filters:
        event = each.error(head, event)
        if each.settles:
            await each.settle()
    await cycle.send({"type": "http.response.body", "body": event, "more_body": False})


def processing_ms(arrived_at: float, now: float) -> tuple[bytes, bytes]:
    """OpenAI's header for the time that the client waited for the response's headers."""
    return (
        b"openai-processing-ms",
        b"%d" % round((now - arrived_at) * 1000),
    )  # the loop's clock has whole milliseconds


def response_headers(headers: Headers, own: Headers, *, is_stream: bool, is_bodiless: bool = False) -> Headers:
    """The client's headers: the worker's without its CORS policy, Server and Date, then `own`.

    A response without a body gets no Content-Length: a length in the worker's header would announce a body that never comes.
    """
    dropped = _STREAM_REPLACED if is_stream or is_bodiless else _NOT_FOR_CLIENTS
    kept = [item for item in headers if item[0] not in dropped and not item[0].startswith(_CORS)]
    if is_stream:
        kept.append((b"x-accel-buffering", b"no"))
        if not any(name == b"cache-control" for name, _ in headers):
            kept.append((b"cache-control", b"no-cache"))
    kept += own
    return kept


def _content_headers(headers: Headers) -> tuple[bytes, bytes, bytes]:
    """The worker's Content-Type, Content-Encoding and `x-llmux-ignored`, each empty if missing. The first of several counts."""
    content_type = encoding = ignored = b""
    for name, value in headers:
        if name == b"content-type":
            content_type = content_type or value
        elif name == b"content-encoding":
            encoding = encoding or value
        elif name == _IGNORED:
            ignored = ignored or value
    return content_type, encoding, ignored
