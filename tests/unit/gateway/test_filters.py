"""An answer on its way through filters: what each gets, and what is left of it once it has gone."""

from __future__ import annotations

import gc
import json
import weakref

import pytest

from supervisor.errors import LlmuxError, UnavailableError
from supervisor.gateway.filters.body_log import Capture
from supervisor.gateway.filters.cache_report import CacheReport
from supervisor.gateway.filters.filters import Filter, FilteredResponse, Head, Use, filtered
from supervisor.gateway.filters.model_name import Rename, renaming
from supervisor.gateway.filters.stream_end import END_OF, StreamJudge
from supervisor.host.store.request_buffer import BodyBudget, Gathered

EVENTS = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]
HELLO = b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\n'
BOOM = b'data: {"error":{"message":"boom","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"


class Worker:
    """Its answer, in pieces."""

    status = 200

    def __init__(self, headers, *pieces):
        self.headers = headers
        self._pieces = [*pieces]

    @property
    def drained(self):
        return not self._pieces

    async def next_chunk(self):
        return self._pieces.pop(0)


class Whole(Filter):
    """Wants all of it."""

    def head(self, head):
        return Use.WHOLE


class Quoted(Filter):
    """Begins with a quote, if all of it has room."""

    def head(self, head):
        return Use.WHOLE_IF_SMALL

    async def whole(self, body, head):
        return b"'" + body


async def received(answer):
    """All of it, and the error that it ended with."""
    body = b""
    try:
        while not answer.drained:
            body += await answer.next_chunk()
    except LlmuxError as error:
        return body, error.message
    return body, None


def judge():
    return StreamJudge(END_OF["/v1/chat/completions"])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([HELLO, BOOM], "boom"),
        ([HELLO + BOOM, DONE], "boom"),
        ([HELLO, DONE], "The worker ended its answer without saying that it is complete."),
    ],
)
async def test_a_stream_is_judged_before_it_is_filtered(pieces, message):
    capture = Capture(b"")
    answer = await filtered(Worker(EVENTS, *pieces), [capture], Gathered(), judge())
    assert await received(answer) == (HELLO, message)
    assert bytes(capture.answer) == HELLO


async def test_a_failed_stream_is_in_no_cycle():
    answer = await filtered(Worker(EVENTS, HELLO, DONE), [Capture(b"")], Gathered(), judge())
    assert isinstance(answer, FilteredResponse)
    await received(answer)
    gone = weakref.ref(answer)
    gc.disable()
    try:
        del answer
        assert gone() is None
    finally:
        gc.enable()


async def test_a_body_without_room_passes_where_nobody_needs_it_whole():
    body = json.dumps({"model": "theirs", "text": "x" * 100_000}, separators=(",", ":")).encode()

    def filters():
        return [CacheReport([], ()), Rename(renaming("theirs", "mine")), Quoted()]

    budget = BodyBudget()
    head = [*JSON, (b"content-length", b"%d" % len(body))]
    wanted = body.replace(b"theirs", b"mine")
    answer = await filtered(Worker(head, body), filters(), Gathered(budget))
    assert await received(answer) == (b"'" + wanted, None)
    budget.limit, budget.used = 150_000, 90_000
    answer = await filtered(Worker(head, body[:60_000], body[60_000:]), filters(), Gathered(budget))
    assert await received(answer) == (wanted, None)
    with pytest.raises(UnavailableError):
        await filtered(Worker(head, body), [Whole()], Gathered(budget))


def test_an_error_passes_all_that_see_errors():
    capture = Capture(b"")
    assert capture.error(Head(404, JSON), b"{}") == b"{}"
    assert (bytes(capture.answer), capture.answer_type) == (b"{}", "application/json")
