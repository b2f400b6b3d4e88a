"""The admission queue against a plain sorted list, and its cost when it is long."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.admission.queue import LATELY_S, MOST_WAITS, AdmissionQueue, RecentWaits
from supervisor.core.demand import DEFAULT_DEMAND, HIGH, LOW, NORMAL, Demand
from supervisor.core.effects import QueueLoad
from supervisor.core.types import MODEL_PLACEHOLDER, Limits, ModelId, Policy, RejectCode, TicketId
from tests.support.counts import examples
from tests.support.simulation import World, load, model

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")


def ticket(number: int) -> TicketId:
    return TicketId(f"t{number}")


def drained(queue: AdmissionQueue, model: ModelId) -> list[TicketId]:
    served = []
    while (waiting := queue.pop(model)) is not None:
        served.append(waiting.ticket)
    return served


class TestOrder:
    """The more urgent first, then first in, first out."""

    def test_equal_priorities_are_served_in_order_of_arrival(self):
        queue = AdmissionQueue()
        for number in range(5):
            assert queue.push(ticket(number), A, DEFAULT_DEMAND, float(number)) is None

        assert [ticket(n) for n in range(5)] == drained(queue, A)

    def test_a_higher_priority_overtakes_but_does_not_become_the_oldest(self):
        queue = AdmissionQueue()
        queue.push(ticket(1), A, DEFAULT_DEMAND, 1.0)
        queue.push(ticket(2), A, Demand(HIGH), 2.0)
        queue.push(ticket(3), A, Demand(HIGH), 3.0)

        assert queue.oldest(A) == 1.0
        assert [ticket(2), ticket(3), ticket(1)] == drained(queue, A)

    def test_one_models_requests_are_not_another_ones(self):
        queue = AdmissionQueue()
        queue.push(ticket(1), A, DEFAULT_DEMAND, 1.0)

        assert queue.pop(B) is None
        assert queue.peek(B) is None
        assert queue.oldest(B) is None
        assert queue.clear(B) == []
        assert (queue.count(A), queue.count(B), len(queue)) == (1, 0, 1)


class TestLimits:
    """A full queue refuses at once and says by how much it is full."""

    def test_the_total_is_limited(self):
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_total=2)))
        queue.push(ticket(1), A, DEFAULT_DEMAND, 0.0)
        queue.push(ticket(2), B, DEFAULT_DEMAND, 0.0)

        assert queue.push(ticket(3), C, DEFAULT_DEMAND, 0.0) == "2 requests are queued, the limit is 2"
        assert ticket(3) not in queue

    def test_one_model_cannot_take_all_of_it(self):
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_per_model=1)))
        queue.push(ticket(1), A, DEFAULT_DEMAND, 0.0)

        assert (
            queue.push(ticket(2), A, Demand(HIGH), 0.0)
            == f"1 requests are queued for {MODEL_PLACEHOLDER}, the limit is 1"
        )
        assert queue.push(ticket(3), B, DEFAULT_DEMAND, 0.0) is None

    @pytest.mark.parametrize("most", [1, 3])
    def test_a_model_may_say_how_many(self, most):
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_per_model=2)))
        waiting = [n for n in range(5) if queue.push(ticket(n), A, DEFAULT_DEMAND, 0.0, most) is None]
        assert len(waiting) == most

    def test_smaller_limits_keep_who_is_queued_already(self):
        admission = AdmissionPolicy()
        queue = AdmissionQueue(admission)
        for number in range(3):
            queue.push(ticket(number), A, DEFAULT_DEMAND, 0.0)
        admission.configured(Limits(queue_total=1), Policy())

        assert len(queue) == 3
        assert queue.push(ticket(9), B, DEFAULT_DEMAND, 0.0) is not None

    def test_a_ticket_is_queued_once(self):
        queue = AdmissionQueue()
        queue.push(ticket(1), A, DEFAULT_DEMAND, 0.0)

        with pytest.raises(AssertionError, match="queued already"):
            queue.push(ticket(1), B, DEFAULT_DEMAND, 0.0)


class TestExpiry:
    """Nobody waits longer than `queue_wait_s`."""

    def test_the_oldest_decides_the_deadline_whatever_its_priority(self):
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_wait_s=10.0)))
        assert queue.deadline() == math.inf
        queue.push(ticket(1), A, DEFAULT_DEMAND, 1.0)
        queue.push(ticket(2), A, Demand(HIGH), 2.0)
        assert queue.deadline() == 11.0

        assert queue.expired(10.9) == []
        assert [ticket(1)] == [waiting.ticket for waiting in queue.expired(11.0)]
        assert queue.deadline() == 12.0

    def test_a_new_limit_counts_for_those_already_waiting(self):
        admission = AdmissionPolicy(Limits(queue_wait_s=10.0))
        queue = AdmissionQueue(admission)
        queue.push(ticket(1), A, DEFAULT_DEMAND, 0.0)
        queue.push(ticket(2), B, DEFAULT_DEMAND, 4.0)
        admission.configured(Limits(queue_wait_s=3.0), Policy())

        assert [ticket(1)] == [waiting.ticket for waiting in queue.expired(5.0)]
        assert [queue.count(A), queue.count(B)] == [0, 1]

    def test_a_budget_ends_before_the_patience_of_all(self):
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_wait_s=10.0)))
        queue.push(ticket(1), A, DEFAULT_DEMAND, 0.0)
        queue.push(ticket(2), A, Demand(budget_s=3.0), 1.0)
        queue.push(ticket(3), B, Demand(budget_s=99.0), 2.0)
        assert queue.deadline() == 4.0

        assert [ticket(2)] == [waiting.ticket for waiting in queue.expired(4.0)]
        assert queue.deadline() == 10.0

    def test_a_budget_of_a_request_that_left_wakes_nobody(self):
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_wait_s=10.0)))
        queue.push(ticket(1), A, Demand(budget_s=1.0), 0.0)
        queue.push(ticket(2), A, DEFAULT_DEMAND, 0.0)
        queue.remove(ticket(1))

        assert queue.deadline() == 10.0

    def test_those_ahead_are_of_no_lower_class(self):
        queue = AdmissionQueue()
        for number, priority in enumerate((HIGH, NORMAL, NORMAL, LOW)):
            queue.push(ticket(number), A, Demand(priority), 0.0)

        assert [queue.ahead(A, Demand(priority)) for priority in (HIGH, NORMAL, LOW)] == [1, 3, 4]
        assert queue.ahead(B, DEFAULT_DEMAND) == 0


class TestRecentWaits:
    """How long requests waited lately: of one model, of all, and nothing that was long ago."""

    def test_of_one_model_and_of_all(self):
        waits = RecentWaits()
        for number in range(100):
            waits.note(A, number / 100, 10.0)
        waits.note(B, 9.0, 10.0)
        assert round(waits.mean_s(10.0, A) or 0, 3) == 0.495
        assert waits.p95_s(10.0, A) == 0.94
        assert waits.p95_s(10.0, B) == waits.mean_s(10.0, B) == 9.0
        assert round(waits.mean_s(10.0) or 0, 3) == round((49.5 + 9) / 101, 3)

    def test_long_ago_is_nothing(self):
        waits = RecentWaits()
        assert waits.mean_s(0.0) is None
        waits.note(A, 1.0, 10.0)
        assert waits.mean_s(10.0 + LATELY_S) == 1.0
        assert waits.mean_s(10.1 + LATELY_S) is None
        assert waits.p95_s(10.1 + LATELY_S) is None

    def test_only_the_last(self):
        waits = RecentWaits()
        waits.note(A, 1000.0, 0.0)
        for _ in range(MOST_WAITS):
            waits.note(A, 1.0, 0.0)
        assert waits.mean_s(0.0) == 1.0


class TestAFullQueue:
    """Who is refused gets to know how many wait, and how long others did."""

    def test_of_the_model_that_is_full(self):
        world = World(load_s=4.0)
        world.configure(model("a", 4000, target_inflight=1), model("b", 4000), limits=Limits(queue_per_model=2))
        first = world.request("a")
        world.run(10.0)
        load(world, "b")
        assert world.request("b") in world.dispatched  # at once: that is no wait of the other's
        queued = [world.request("a") for _ in range(2)]
        reject = world.rejected[world.request("a")]
        assert reject.code is RejectCode.QUEUE_FULL
        assert reject.about == QueueLoad(2, 4.0)
        world.run(6.0)
        world.finish(first)
        world.request("a")
        assert queued[0] in world.dispatched
        assert world.rejected[world.request("a")].about == QueueLoad(2, 5.0)
        assert world.replays()

    def test_of_a_model_that_says_how_many(self):
        world = World(load_s=4.0)
        world.configure(model("a", 4000, max_queue=1))
        world.request("a")
        assert world.rejected[world.request("a")].about == QueueLoad(1, None)

    def test_of_all_where_all_together_are_too_many(self):
        world = World(load_s=4.0)
        world.configure(model("a", 4000), model("b", 4000), limits=Limits(queue_total=2))
        world.request("a")
        world.request("b")
        assert world.rejected[world.request("b")].about == QueueLoad(2, None)


class TestCost:
    """A long queue makes nothing slower."""

    @staticmethod
    def _turnover_s(queued: int) -> float:
        """CPU time of 200 rounds of push, peek, remove and pop beside `queued` others; the best of five."""
        queue = AdmissionQueue(AdmissionPolicy(Limits(queue_total=10**6, queue_per_model=10**6)))
        for number in range(queued):
            queue.push(ticket(number), ModelId(f"m{number % 100}"), DEFAULT_DEMAND, float(number))
        queue.push(ticket(-1), ModelId("m0"), DEFAULT_DEMAND, float(queued))
        best = math.inf
        for attempt in range(5):
            started = time.process_time()
            for number in range(200):
                fresh = TicketId(f"x{attempt}-{number}")
                queue.push(fresh, ModelId("m1"), Demand(LOW), float(queued))
                queue.peek(ModelId("m1"))
                queue.deadline()
                queue.remove(fresh)
                served = queue.pop(ModelId("m2"))
                if served is not None:
                    queue.push(served.ticket, ModelId("m2"), DEFAULT_DEMAND, float(queued))
            best = min(best, time.process_time() - started)
        queue.check()
        return best

    def test_it_does_not_grow_with_ten_thousand_queued(self):
        assert self._turnover_s(10_000) < 8 * self._turnover_s(200)

    def test_cancelled_requests_do_not_pile_up_behind_a_stuck_model(self):
        queue = AdmissionQueue()
        queue.push(ticket(0), A, Demand(HIGH), 0.0)
        for number in range(1, 1000):
            queue.push(ticket(number), A, DEFAULT_DEMAND, 0.0)
            queue.remove(ticket(number))
            queue.check()


@dataclass(frozen=True)
class Expected:
    ticket: TicketId
    model: ModelId
    priority: int
    arrived_at: float
    seq: int
    until: float = math.inf


class QueueMachine(RuleBasedStateMachine):
    """Every operation beside the same one on a list that is sorted and searched."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(queue_total=12, queue_per_model=6, queue_wait_s=20.0)
        self.queue = AdmissionQueue(AdmissionPolicy(self.limits))
        self.list: list[Expected] = []
        self.now = 0.0
        self.seq = 0

    def line(self, model: ModelId) -> list[Expected]:
        mine = [entry for entry in self.list if entry.model == model]
        return sorted(mine, key=lambda entry: (entry.arrived_at + 2 * entry.priority, entry.seq))  # two seconds a point

    @rule(
        model=st.sampled_from([A, B, C]),
        priority=st.integers(-2, 2),
        budget_s=st.sampled_from([None, None, 1.0, 3.0, 30.0]),
    )
    def push(self, model, priority, budget_s):
        self.seq += 1
        full = self.queue.push(ticket(self.seq), model, Demand(priority, budget_s=budget_s), self.now)
        if len(self.list) >= 12 or len(self.line(model)) >= 6:
            assert full is not None
        else:
            assert full is None
            until = math.inf if budget_s is None else self.now + budget_s
            self.list.append(Expected(ticket(self.seq), model, priority, self.now, self.seq, until))

    @rule(model=st.sampled_from([A, B, C]))
    def pop(self, model):
        line = self.line(model)
        served = self.queue.pop(model)
        assert (line[0].ticket if line else None) == (served.ticket if served else None)
        if line:
            self.list.remove(line[0])

    @precondition(lambda self: self.list)
    @rule(data=st.data())
    def remove(self, data):
        entry = data.draw(st.sampled_from(self.list))
        removed = self.queue.remove(entry.ticket)
        assert removed is not None
        assert (entry.ticket, entry.model) == (removed.ticket, removed.model)
        assert self.queue.remove(entry.ticket) is None
        self.list.remove(entry)

    @rule(model=st.sampled_from([A, B, C]))
    def clear(self, model):
        gone = self.queue.clear(model)
        assert [e.ticket for e in self.list if e.model == model] == [waiting.ticket for waiting in gone]
        self.list = [e for e in self.list if e.model != model]

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        gone = self.queue.expired(self.now)
        impatient = [e for e in self.list if e.arrived_at + 20.0 <= self.now]
        over = [e for e in self.list if e not in impatient and e.until <= self.now]
        over.sort(key=lambda e: (e.until, e.seq))
        assert [e.ticket for e in (*impatient, *over)] == [w.ticket for w in gone]
        self.list = [e for e in self.list if e not in impatient and e not in over]

    @invariant()
    def agrees(self):
        self.queue.check()
        assert len(self.list) == len(self.queue)
        deadlines = (min(e.until, e.arrived_at + 20.0) for e in self.list)
        assert min(deadlines, default=math.inf) == self.queue.deadline()
        for name in (A, B, C):
            line = self.line(name)
            assert len(line) == self.queue.count(name)
            assert min((e.arrived_at for e in line), default=None) == self.queue.oldest(name)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)
