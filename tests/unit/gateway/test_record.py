"""The records of requests: of the last that ended a bounded list of small values, which outlives the daemon."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import weakref
from dataclasses import replace
from itertools import chain

import msgspec
import pytest
import structlog
from msgspec import structs

from supervisor.catalog.keys import Key
from supervisor.core.admission.waiting import WaitKind, WaitReason
from supervisor.core.demand import Demand
from supervisor.core.types import Generation, ModelId, TicketId
from supervisor.daemon.observability.history import History
from supervisor.dialects.openai import OPENAI
from supervisor.engine.events import Hub
from supervisor.engine.ticket import Ticket
from supervisor.engine.waits import WaitTrace, _Phase
from supervisor.errors import UnavailableError
from supervisor.gateway.identity.trace_context import TraceContext
from supervisor.gateway.in_flight import GROUP, GROUP_S, InFlight
from supervisor.gateway.record import ENDED, MESSAGE_LIMIT, restored, written
from supervisor.gateway.request import Request

EPOCH = 1_700_000_000.0


class Big(list):
    """What a context holds while it runs; a list can't be referred to weakly, this can."""


@pytest.fixture
def requests():
    return InFlight(Hub(), EPOCH)


def context(number: int, arrived_at: float, **fields: object) -> Request:
    found = Request(f"req_{number}".encode(), arrived_at, OPENAI, path="/v1/chat/completions", name="a", **fields)
    found.ticket_id, found.entered_at, found.attempt.model = TicketId(str(number)), arrived_at, ModelId("a")
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

    async def test_thousands_are_recorded_a_group_in_each_turn(self, requests):
        """A worker with all of them has ended, for one."""
        groups, most = [], 3 * GROUP + 5
        requests.listeners.append(lambda ended: groups.append([each.ticket_id for each in ended]))
        for number in range(most):
            requests.finished(context(number, asyncio.get_running_loop().time()))
        seen = []
        while sum(map(len, groups)) < most:
            seen.append(len(groups))
            await asyncio.sleep(0)
        assert seen == [*range(len(groups))]
        assert [len(group) for group in groups] == [GROUP, GROUP, GROUP, 5]
        assert [*chain.from_iterable(groups)] == [str(number) for number in range(most)]

    @pytest.mark.parametrize("turns", range(4))
    async def test_who_looks_meanwhile_sees_them_all(self, requests, turns):
        groups = []
        requests.listeners.append(lambda ended: groups.append([each.ticket_id for each in ended]))
        for number in range(3 * GROUP):
            requests.finished(context(number, asyncio.get_running_loop().time()))
        for _ in range(turns):
            await asyncio.sleep(0)
        await requests.recorded()
        assert [*chain.from_iterable(groups)] == [str(number) for number in range(3 * GROUP)]
        assert max(map(len, groups)) == GROUP
        await settled()
        assert len(groups) == 3

    async def test_a_view_of_many_leaves_out_who_has_ended_meanwhile(self, requests):
        running = [context(number, asyncio.get_running_loop().time()) for number in range(3)]
        for each in running:
            requests.begin(each, None)
        views = requests.views()
        assert next(views).id == "0"
        requests.finished(running[1])
        requests.begin(context(3, 0.0), None)
        assert [view.id for view in views] == ["2"]

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
        request.attempt.ticket = Ticket(TicketId("1"), ModelId("a"), now - 100.0, Generation(1), admitted=now - 100.0)
        request.attempt.outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":100}}')
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
        assert sum(map(sys.getsizeof, kept)) < 2 * 1024 * 1024

    async def test_no_context_ticket_or_exception_stays(self, requests):
        big = Big([(b"x-extra", b"1")])
        gone = weakref.ref(big)
        gc.disable()
        try:
            request = context(1, asyncio.get_running_loop().time(), extra=big)
            request.attempt.ticket = Ticket(TicketId("1"), ModelId("a"), 0.0, Generation(1))
            request.waits.append(
                WaitTrace(ModelId("a"), 0.0, _Phase(WaitReason(WaitKind.LOAD, "the model to load"), 0.0))
            )
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
        assert requests.find("1").error_message == "No memory."

    async def test_of_a_long_message_the_beginning(self, requests):
        request = context(1, asyncio.get_running_loop().time())
        request.fail(UnavailableError("x" * 5000))
        requests.finished(request)
        await settled()
        assert requests.find("1").error_message == "x" * MESSAGE_LIMIT


class TestView:
    """Its figures are those of the request."""

    async def test_of_a_stream(self, requests):
        now = asyncio.get_running_loop().time()
        request = context(7, now - 10.0, stream=True)
        request.attempt.outcome.status = 200
        request.attempt.outcome.first_byte_at = now - 4.0
        request.attempt.outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":100}}')
        request.waits.append(
            WaitTrace(ModelId("a"), now - 9.0, _Phase(WaitReason(WaitKind.LOAD, "the model to load"), 0.0))
        )
        request.waits[0].end(now - 5.0)
        requests.finished(request)
        await settled()
        told = msgspec.to_builtins(next(requests.last()).view(EPOCH))
        assert told["at"] == pytest.approx(EPOCH + now - 10.0, abs=0.01)
        assert told["first_token_ms"] == pytest.approx(6000, abs=1)
        assert told["tokens_per_s"] == pytest.approx(25, rel=0.05)
        assert [(part["kind"], part["s"]) for part in told["wait"]] == [("body", 1.0), ("load", 4.0)]
        assert told["wait"][1]["what"] == "It waited for the model to load."

    async def test_to_look_at_one_in_flight_changes_nothing(self):
        request = context(7, 10.0, stream=True)
        before = replace(request)
        assert [request.record(now).view(EPOCH).total_ms for now in (11.0, 12.0)] == [1000, 2000]
        assert request == before

    async def test_the_latest_of_several_with_one_name(self, requests):
        now = asyncio.get_running_loop().time()
        for number in (1, 2):
            request = context(number, now)
            request.request_id = b"mine"
            requests.finished(request)
        await settled()
        assert requests.find("mine").id == "2"


def plain() -> Request:
    """A whole answer of a loaded model."""
    request = context(1, 1000.1234)
    request.entered_at, request.attempt.model = 1000.124, ModelId("a-1")
    request.attempt.ticket = Ticket(
        TicketId("1"), ModelId("a-1"), 1000.124, Generation(3), devices=("cuda:0",), admitted=1000.2
    )
    request.attempt.outcome.status, request.attempt.outcome.first_byte_s, request.attempt.outcome.first_byte_at = (
        200,
        0.0123,
        1000.3,
    )
    request.attempt.outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":100}}')
    return request


def unusual() -> Request:
    """A stream that waited, and broke off; with all fields that a line has where they are unusual."""
    request = context(2, 1000.1234567, stream=True, key=Key("anna", b"", frozenset()))
    request.attempt.ignored = ("top_k", "x y")
    request.demand, request.trace = Demand(20, "team"), TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", None, True)
    request.attempt.ticket = Ticket(
        TicketId("2"), ModelId("a"), 1000.124, Generation(3), admitted=1004.2, cut_reason="unloaded"
    )
    load = _Phase(WaitReason(WaitKind.LOAD, "the model to load."), 1001.33333)
    turn = _Phase(WaitReason(WaitKind.TURN, "its turn, after b", (ModelId("b"),)), 1000.0, load)
    request.waits.append(WaitTrace(ModelId("a"), 1000.124, turn))
    request.waits[0].end(1004.2)
    outcome = request.attempt.outcome
    outcome.status, outcome.error, outcome.error_message = 200, "model_unloaded", "It was stopped."
    outcome.first_byte_s, outcome.first_byte_at = 0.0123, 1004.3
    outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":7}}')
    return request


def refused() -> Request:
    request = Request(b"req_3", 1002.0, OPENAI, path="/v1/x", key=Key("anna", b"", frozenset()))
    request.fail(UnavailableError("No memory."))
    return request


def own() -> Request:
    """Its tenant is its key, which is as usual, but its priority isn't."""
    request = plain()
    request.key, request.demand = Key("anna", b"", frozenset()), Demand(80, "anna")
    return request


def nothing() -> Request:
    """A stream of no tokens, for a tenant without a key."""
    request = plain()
    request.stream, request.demand = True, Demand(tenant="team")
    request.attempt.outcome.keep(b'{"usage":{"prompt_tokens":5,"completion_tokens":0}}')
    return request


def instant() -> Request:
    """A stream that took a moment: its rate has many digits."""
    request = plain()
    request.stream, request.attempt.outcome.first_byte_at = True, 1005.5555499
    return request


# As the first daemon that kept requests wrote them: `plain`, `unusual` and `refused`.
OLD = (
    '{"model":"a-1","view":{"request_id":"req_1","path":"/v1/chat/completions","model":"a","worker":"a-1:3","key":null,"status":200,"error":null,"cut":null,"queue_ms":76.0,"first_byte_ms":12.3,"total_ms":5432.2,"bytes":53,"prompt_tokens":5,"completion_tokens":100,"tenant":null,"priority":50,"id":"run-1","at":1700001000.123,"stream":false,"wait":[],"first_token_ms":176.6,"tokens_per_s":null,"error_message":null}}',
    '{"model":"a-1","view":{"request_id":"req_2","path":"/v1/chat/completions","model":"a","worker":"a-1:3","key":"anna","status":200,"error":"model_unloaded","cut":"unloaded","queue_ms":4076.0,"first_byte_ms":12.3,"total_ms":5432.1,"bytes":51,"prompt_tokens":5,"completion_tokens":7,"priority":20,"tenant":"team","trace_id":"4bf92f3577b34da6a3ce929d0e0e4736","ignored":["top_k","x?y"],"id":"run-2","at":1700001000.123,"stream":true,"wait":[{"kind":"turn","what":"It waited for its turn, after b.","s":1.209},{"kind":"load","what":"It waited for the model to load.","s":2.867}],"first_token_ms":4176.5,"tokens_per_s":5.58,"error_message":"It was stopped."}}',
    '{"model":null,"view":{"request_id":"req_3","path":"/v1/chat/completions","model":null,"worker":null,"key":"anna","status":503,"error":"unavailable","cut":null,"queue_ms":null,"first_byte_ms":null,"total_ms":3555.6,"bytes":0,"prompt_tokens":null,"completion_tokens":null,"tenant":null,"priority":50,"id":null,"at":1700001002.0,"stream":false,"wait":[{"kind":"body","what":"It waited for its body to arrive and be read.","s":3.556}],"first_token_ms":null,"tokens_per_s":null,"error_message":"No memory."}}',
)


class TestRestored:
    """A later daemon shows the same: all fields, in the same order, whatever its own clock."""

    EPOCHS = (EPOCH, EPOCH + 86_400.123456, EPOCH - 3.3e7, 0.0)

    @pytest.mark.parametrize("epoch", EPOCHS)
    @pytest.mark.parametrize("made", [plain, unusual, refused, own, nothing, instant])
    def test_what_it_wrote(self, made, epoch):
        request = made()
        request.counted()
        before = request.record(1005.55555)
        after = restored(written(before, EPOCH, "run"), epoch)
        number = None if before.id is None else f"run-{before.id}"
        assert after.view(epoch) == structs.replace(before.view(EPOCH), id=number)
        assert msgspec.json.encode(after.line()) == msgspec.json.encode(before.line())
        assert (after.id, after.key, after.demand.tenant) == (number, before.key, before.demand.tenant)
        assert after.has_failed is before.has_failed
        assert [after.is_about(name) for name in ("a", "a-1", "b")] == [before.is_about(n) for n in ("a", "a-1", "b")]
        assert written(after, epoch, "x") == written(before, EPOCH, "x-run"), "nor does it change when written again"

    @pytest.mark.parametrize("epoch", EPOCHS)
    @pytest.mark.parametrize("text", OLD)
    def test_what_an_older_one_wrote(self, text, epoch):
        found = restored(text, epoch)
        assert {"model": found.model_id, "view": msgspec.to_builtins(found.view(epoch))} == json.loads(text)

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"view":5}', '{"model":null,"view":{"request_id":"x"}}', "[" * 5000, OLD[0][:-1]]
    )
    def test_another_text_is_none(self, text):
        assert restored(text, EPOCH) is None
