"""The requests that ended last: a bounded list of small values, from which the JSON is made when somebody asks."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from dataclasses import replace

import pytest
import structlog

from supervisor.core.types import Generation, ModelId, TicketId
from supervisor.core.waiting import Awaited, WaitKind
from supervisor.daemon.history import History
from supervisor.dialects.openai import OPENAI
from supervisor.engine.events import Hub
from supervisor.engine.ticket import Ticket
from supervisor.engine.waits import Wait, _Phase
from supervisor.errors import UnavailableError
from supervisor.gateway.ended import ENDED, MESSAGE_LIMIT
from supervisor.gateway.requests import GROUP, GROUP_S, InFlight, RequestContext

EPOCH = 1_700_000_000.0


class Big(list):
    """What a context holds while it runs; a list can't be referred to weakly, this can."""


@pytest.fixture
def requests():
    return InFlight(Hub(), EPOCH)


def context(number: int, arrived_at: float, **fields: object) -> RequestContext:
    found = RequestContext(
        f"req_{number}".encode(), arrived_at, OPENAI, path="/v1/chat/completions", name="a", **fields
    )
    found.ticket_id, found.entered_at, found.model = TicketId(str(number)), arrived_at, ModelId("a")
    return found


async def settled() -> None:
    await asyncio.sleep(2 * GROUP_S)


class TestGroups:
    """They are recorded together, soon, in their order; what can't wait isn't."""

    async def test_soon_and_all_at_once(self, requests):
        groups, told = [], []
        requests.listeners.append(lambda ended: groups.append([each.request_id for each in ended]))
        requests.observers.append(lambda one: told.append(one.request_id))
        now = asyncio.get_running_loop().time()
        for number in (1, 2):
            requests.finished(context(number, now))
        assert (groups, told) == ([], [b"req_1", b"req_2"])
        await settled()
        assert groups == [[b"req_1", b"req_2"]]

    async def test_many_don_t_wait(self, requests):
        groups = []
        requests.listeners.append(lambda ended: groups.append(len(ended)))
        now = asyncio.get_running_loop().time()
        for number in range(GROUP):
            requests.finished(context(number, now))
        await asyncio.sleep(0)
        requests.finished(context(GROUP, now))
        assert groups == [GROUP]
        await settled()
        assert groups == [GROUP, 1]

    async def test_who_looks_sees_them(self, requests):
        requests.finished(context(1, asyncio.get_running_loop().time()))
        assert [each.id for each in requests.last()] == ["1"]
        requests.finished(context(2, asyncio.get_running_loop().time()))
        assert requests.find("req_2").id == "2"
        requests.record()  # there is nothing more

    async def test_a_line_has_the_time_of_the_end(self, requests):
        request = context(1, asyncio.get_running_loop().time() - 1.0)
        requests.finished(request)
        with structlog.testing.capture_logs() as lines:
            await settled()
        (line,) = lines
        took_s = request.ended_at - request.arrived_at
        assert line["_line"].total_ms == round(took_s * 1000, 1)
        now = time.time() - asyncio.get_running_loop().time()
        assert line["_at"] == pytest.approx(now + request.ended_at, abs=0.001)

    async def test_who_stumbles_over_them_stops_nobody(self, requests):
        groups = []
        requests.listeners += [lambda ended: ended[0].nothing, lambda ended: groups.append(len(ended))]
        requests.finished(context(1, asyncio.get_running_loop().time()))
        with structlog.testing.capture_logs() as lines:
            requests.record()
        assert groups == [1]
        assert [line["event"] for line in lines] == ["request.finished", "request.mishandled"]

    async def test_that_are_told_late_count_when_they_came(self, requests):
        """Also one that took longer than the history goes back to."""
        now = asyncio.get_running_loop().time()
        history = History()
        requests.listeners.append(history.count_tokens)
        history.sample(now, {})
        request = context(1, now - 100.0)
        request.ticket = Ticket(TicketId("1"), ModelId("a"), now - 100.0, Generation(1), admitted=now - 100.0)
        request.outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":100}}')
        requests.finished(request)
        history.sample(now + 2 * history.interval_s, {})
        requests.record()
        _, series = history.series()
        assert series["tokens_per_s"][0] > 0


class TestBound:
    """The last thousand are kept, and nothing that they held."""

    async def test_a_thousand(self, requests):
        now = asyncio.get_running_loop().time()
        for number in range(ENDED + 200):
            requests.finished(context(number, now))
        await settled()
        kept = list(requests.last())
        assert (len(kept), kept[0].id, kept[-1].id) == (ENDED, str(ENDED + 199), "200")
        assert requests.find("199") is None
        assert requests.find("req_200") is kept[-1]
        assert sum(map(sys.getsizeof, kept)) + sum(sys.getsizeof(each.line) for each in kept) < 2 * 1024 * 1024

    async def test_no_context_ticket_or_exception_stays(self, requests):
        big = Big([(b"x-extra", b"1")])
        gone = weakref.ref(big)
        gc.disable()
        try:
            request = context(1, asyncio.get_running_loop().time(), extra=big)
            request.ticket = Ticket(TicketId("1"), ModelId("a"), 0.0, Generation(1))
            request.waits.append(Wait(ModelId("a"), 0.0, _Phase(Awaited(WaitKind.LOAD, "the model to load"), 0.0)))
            request.waits[0].end(1.0)
            try:
                raise UnavailableError("No memory.")
            except UnavailableError as error:
                request.fail(error)
            requests.finished(request)
            await settled()
            del big, request
            assert gone() is None
        finally:
            gc.enable()
        assert requests.find("1").message == "No memory."

    async def test_of_a_long_message_the_beginning(self, requests):
        request = context(1, asyncio.get_running_loop().time())
        request.fail(UnavailableError("x" * 5000))
        requests.finished(request)
        await settled()
        assert requests.find("1").message == "x" * MESSAGE_LIMIT


class TestView:
    """Its figures are those of the request."""

    async def test_of_a_stream(self, requests):
        now = asyncio.get_running_loop().time()
        request = context(7, now - 10.0, stream=True)
        request.outcome.status = 200
        request.outcome.first_byte_at = now - 4.0
        request.outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":100}}')
        request.waits.append(Wait(ModelId("a"), now - 9.0, _Phase(Awaited(WaitKind.LOAD, "the model to load"), 0.0)))
        request.waits[0].end(now - 5.0)
        requests.finished(request)
        await settled()
        told = next(requests.last()).view(EPOCH)
        assert told["at"] == pytest.approx(EPOCH + now - 10.0, abs=0.01)
        assert told["first_token_ms"] == pytest.approx(6000, abs=1)
        assert told["tokens_per_s"] == pytest.approx(25, rel=0.05)
        assert [(part["kind"], part["s"]) for part in told["wait"]] == [("body", 1.0), ("load", 4.0)]
        assert told["wait"][1]["what"] == "It waited for the model to load."

    async def test_to_look_at_one_in_flight_changes_nothing(self):
        request = context(7, 10.0, stream=True)
        before = replace(request)
        assert [request.view(now, EPOCH)["total_ms"] for now in (11.0, 12.0)] == [1000, 2000]
        assert request == before

    async def test_the_latest_of_several_with_one_name(self, requests):
        now = asyncio.get_running_loop().time()
        for number in (1, 2):
            request = context(number, now)
            request.request_id = b"mine"
            requests.finished(request)
        await settled()
        assert requests.find("mine").id == "2"
