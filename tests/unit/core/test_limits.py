"""Limits of tenants: never more than promised, never less, and nothing for what was refused."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from supervisor.core.admission.limits import (
    MOST_KEPT,
    REFUSAL_LOG_INTERVAL_S,
    Account,
    Accounts,
    Counted,
    Rate,
    TenantLimits,
)
from supervisor.core.effects import Decided
from supervisor.core.events import UnloadRequested, WorkerUnready
from supervisor.core.types import Limits, ModelId, RejectCode, TicketId
from tests.support.counts import examples
from tests.support.simulation import World, load, model, record

rates = st.builds(Rate, st.integers(1, 30), st.sampled_from([1.0, 60.0, 3600.0]))
A = ModelId("a")


def account(requests: Rate | None = None, tokens: Rate | None = None, concurrency: int | None = None) -> Account:
    return Account("tenant alice", TenantLimits(requests, tokens, concurrency))


def admitted_at(accounts: Accounts, who: Account, times: list[float], tokens: int = 0) -> list[float]:
    """The times at which a request was let through; each ends at once."""
    through = []
    for number, now in enumerate(times):
        if accounts.reached([who], now) is None:
            ticket = TicketId(f"{now}-{number}")
            accounts.admit(ticket, [who], now)
            accounts.finished(ticket, tokens, now)
            through.append(now)
    return through


class TestRequests:
    """A bucket of `count` that fills evenly."""

    @given(rates, st.lists(st.floats(0, 3.0), max_size=120), st.floats(0, 1e7))
    @settings(max_examples=examples(300))
    def test_never_more_than_the_bucket_and_what_has_flowed_in(self, rate, gaps, start):
        now, times = start, []
        for gap in gaps:
            now += gap * rate.period_s / rate.count
            times.append(now)
        through = admitted_at(Accounts(), account(rate), times)

        for first in range(len(through)):
            for last in range(first, len(through)):
                most = rate.count + (through[last] - through[first]) * rate.per_s
                assert last - first + 1 <= most + 1e-3

    @given(rates, st.lists(st.integers(0, 40), min_size=1, max_size=40), st.floats(0, 1e7))
    @settings(max_examples=examples(300))
    def test_who_asks_no_faster_is_never_refused(self, rate, pauses, start):
        """An independent account of the same bucket, in whole units: each pause is a whole number of them."""
        times, left, now = [], rate.count, start
        for pause in pauses:
            left = min(rate.count, left + pause)
            now += pause / rate.per_s
            while left > pause % 3:
                left -= 1
                times.append(now)
        assert admitted_at(Accounts(), account(rate), times) == times

    def test_after_the_burst_one_at_a_time(self):
        accounts, who = Accounts(), account(Rate(100, 60.0))
        assert len(admitted_at(accounts, who, [5.0] * 150)) == 100
        (standing,) = accounts.standings([who], 5.0)
        assert (standing.limit, standing.remaining, standing.next_s, standing.reset_s) == (100, 0, 0.6, 60.0)

        assert admitted_at(accounts, who, [5.5, 5.7, 5.8, 6.3]) == [5.7, 6.3]

    def test_a_refusal_costs_nothing(self):
        accounts, who = Accounts(), account(Rate(2, 60.0))
        admitted_at(accounts, who, [0.0, 0.0])
        for _ in range(100):
            assert accounts.reached([who], 1.0) is not None
        assert accounts.reached([who], 30.0) is None

    def test_what_was_admitted_and_got_no_worker_is_given_back(self):
        accounts, who = Accounts(), account(Rate(1, 60.0), concurrency=1)
        accounts.admit(TicketId("1"), [who], 0.0)
        assert accounts.reached([who], 0.0) is not None
        accounts.refused(TicketId("1"), 0.0)
        assert accounts.reached([who], 0.0) is None
        assert accounts.used_limits(0.0) == []

    def test_every_account_has_to_allow_it(self):
        accounts = Accounts()
        key = Account("key gateway", TenantLimits(requests=Rate(3)))
        tenants = [Account(f"tenant {name}", TenantLimits(requests=Rate(2))) for name in "ab"]
        through = []
        for number, tenant in enumerate([tenants[0]] * 3 + [tenants[1]] * 3):
            reached = accounts.reached([tenant, key], 0.0)
            through.append(reached and reached.account)
            if reached is None:
                accounts.admit(TicketId(str(number)), [tenant, key], 0.0)
        assert through == [None, None, "tenant a", None, "key gateway", "key gateway"]

    def test_a_smaller_limit_counts_from_the_next_request_on(self):
        accounts = Accounts()
        admitted_at(accounts, account(Rate(100)), [0.0] * 50)
        assert accounts.reached([account(Rate(10))], 0.0) is not None
        assert accounts.reached([account(Rate(100))], 0.0) is None


class TestTokens:
    """They are charged when they are known, so one answer may overdraw; what follows waits until it is paid."""

    @given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 300))
    def test_never_more_than_the_bucket_the_flow_and_the_last_answer(self, sizes, count):
        accounts, who, rate = Accounts(), account(tokens=Rate(count, 60.0)), Rate(count, 60.0)
        taken, largest = 0, 0
        for now, size in enumerate(sizes):
            if accounts.reached([who], now) is None:
                accounts.admit(TicketId(str(now)), [who], now)
                accounts.finished(TicketId(str(now)), size, now)
                taken, largest = taken + size, max(largest, size)
                assert taken <= count + now * rate.per_s + largest + 1e-6

    def test_a_debt_is_waited_for(self):
        accounts, who = Accounts(), account(tokens=Rate(60, 60.0))
        assert len(admitted_at(accounts, who, [0.0], tokens=180)) == 1
        reached = accounts.reached([who], 0.0)
        assert reached is not None
        assert (reached.counted, reached.remaining, reached.next_s, reached.reset_s) == (
            Counted.TOKENS,
            0,
            121.0,
            180.0,
        )
        assert accounts.reached([who], 120.5) is not None
        assert accounts.reached([who], 121.0) is None


class TestConcurrency:
    """Requests that wait or run."""

    def test_an_end_makes_room(self):
        accounts, who = Accounts(), account(concurrency=2)
        accounts.admit(TicketId("1"), [who], 0.0)
        accounts.admit(TicketId("2"), [who], 0.0)
        reached = accounts.reached([who], 1000.0)
        assert reached is not None
        assert reached.description() == "2 requests at once"
        accounts.finished(TicketId("1"), 0, 1000.0)
        assert accounts.reached([who], 1000.0) is None


class TestMemory:
    """Clients may make up names: only the last that took something are remembered."""

    def test_names_are_forgotten(self):
        accounts, rate = Accounts(), Rate(10, 60.0)
        hog = Account("hog", TenantLimits(requests=rate))
        admitted_at(accounts, hog, [0.0] * 10)
        for number in range(3 * MOST_KEPT):
            admitted_at(accounts, Account(f"{number}", TenantLimits(requests=rate)), [0.0])
            assert len(accounts) <= MOST_KEPT
        assert accounts.reached([hog], 1.0) is not None, "who took most is not forgotten"

    def test_open_requests_are_never_forgotten(self):
        accounts, who = Accounts(), account(concurrency=1)
        accounts.admit(TicketId("open"), [who], 0.0)
        for number in range(2 * MOST_KEPT):
            other = Account(f"{number}", TenantLimits(concurrency=1))
            admitted_at(accounts, other, [0.0])
        assert accounts.reached([who], 0.0) is not None
        accounts.finished(TicketId("open"), 0, 0.0)
        accounts.check()

    def test_without_limits_nothing_is_known(self):
        world = World()
        world.configure(model("a", 4000))
        world.finish(world.request("a"))
        assert len(world.admission.accounts) == 0


class Model(RuleBasedStateMachine):
    """Against a list of everything that happened."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = Accounts()
        self.who = account(Rate(4, 10.0), concurrency=3)
        self.now = 0.0
        self.level = 0.0
        self.open: deque[TicketId] = deque()
        self.count = 0

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.5, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.level = max(0.0, self.level - 0.4 * seconds)

    @rule()
    def ask(self) -> None:
        may = self.level <= 3 + 1e-9 and len(self.open) < 3
        assert (self.accounts.reached([self.who], self.now) is None) == may
        if may:
            self.count += 1
            self.level += 1
            self.open.append(TicketId(str(self.count)))
            self.accounts.admit(self.open[-1], [self.who], self.now)

    @rule(served=st.booleans(), oldest=st.booleans())
    def end(self, served: bool, oldest: bool) -> None:
        if self.open:
            ticket = self.open.popleft() if oldest else self.open.pop()
            if served:
                self.accounts.finished(ticket, 0, self.now)
            else:
                self.accounts.refused(ticket, self.now)
                self.level = max(0.0, self.level - 1)

    @invariant()
    def lawful(self) -> None:
        self.accounts.check()


TestAgainstAModel = Model.TestCase
TestAgainstAModel.settings = settings(max_examples=examples(80), stateful_step_count=40)


def limited(world: World, count: int = 2) -> tuple[Account, ...]:
    world.configure(model("a", 4000, target_inflight=1), limits=Limits(queue_per_model=1, queue_wait_s=5.0))
    return (account(Rate(count, 60.0)),)


def left(world: World, accounts: tuple[Account, ...]) -> int:
    return world.admission.accounts.standings(accounts, world.now)[0].remaining


class TestRequestsOfTheScheduler:
    """Where a request is charged, and where not."""

    def test_beyond_the_limit_it_is_refused_at_once(self):
        world = World()
        accounts = limited(world)
        load(world, "a")
        first, second, third = (world.request("a", accounts=accounts) for _ in range(3))
        assert {first, second} == set(world.open)
        reject = world.rejected[third]
        assert reject.code is RejectCode.RATE_LIMIT_EXCEEDED
        assert reject.message == "The limit of tenant alice is reached: 2 requests per minute. Try again in 30 s."
        assert reject.retry_after_s == 30
        world.run(31.0)
        world.finish(first)
        world.finish(second)
        assert world.request("a", accounts=accounts) in world.dispatched
        assert world.replays()

    @pytest.mark.parametrize("name", ["nobody's", "a"])
    def test_what_is_refused_for_another_reason_is_not_charged(self, name):
        world = World()
        accounts = limited(world, 5)
        for _ in range(2):  # runs, waits
            world.request("a")
        world.request(name, accounts=accounts)
        assert [each.code for each in world.rejected.values()][-1] in {
            RejectCode.MODEL_NOT_FOUND,
            RejectCode.QUEUE_FULL,
        }
        assert left(world, accounts) == 5

    def test_the_limit_comes_before_a_full_queue(self):
        """Who has used up its limit is told so, whatever others do: it should come again later than they."""
        world = World()
        accounts = limited(world, 1)
        world.request("a", accounts=accounts)
        assert world.rejected[world.request("a", accounts=accounts)].code is RejectCode.RATE_LIMIT_EXCEEDED

    @pytest.mark.parametrize(
        "refuse",
        [lambda world: world.run(6.0), lambda world: world.post(UnloadRequested(A))],
        ids=["waited too long", "unloaded"],
    )
    def test_a_waiter_that_is_refused_gets_it_back(self, refuse):
        world = World(load_s=100.0)
        accounts = limited(world)
        world.request("a", accounts=accounts)
        assert left(world, accounts) == 1
        refuse(world)
        assert not world.open
        assert left(world, accounts) == 2

    def test_a_client_that_leaves_has_asked(self):
        world = World(load_s=100.0)
        accounts = limited(world)
        world.finish(world.request("a", accounts=accounts))
        assert left(world, accounts) == 1

    def test_what_no_worker_got_is_given_back(self):
        world = World()
        accounts = limited(world)
        load(world, "a")
        world.finish(world.request("a", accounts=accounts), served=False)
        assert left(world, accounts) == 2

    def test_a_worker_that_dies_ends_its_requests(self):
        world = World()
        world.configure(model("a", 4000))
        load(world, "a")
        accounts = (account(concurrency=1),)
        world.request("a", accounts=accounts)
        world.crash("a")
        world.run(0.1)
        assert left(world, accounts) == 1

    def test_a_refusal_is_a_decision_now_and_then(self):
        world = World()
        accounts = limited(world, 1)
        load(world, "a")
        for _ in range(50):
            world.request("a", accounts=accounts)
            world.now += REFUSAL_LOG_INTERVAL_S / 100
        assert [kind for kind, _ in world.reasons("a")].count("limit") == 1
        assert Decided("limit", A, "The limit of tenant alice is reached: 1 request per minute.") in world.decided()

    def test_a_reload_keeps_what_was_taken(self):
        world = World()
        accounts = limited(world)
        world.request("a", accounts=accounts)
        limited(world)
        assert left(world, accounts) == 1


class TestUnlimited:
    """Who has no limit pays nothing for those that have."""

    def test_the_cost_of_a_request_is_the_same_beside_many_accounts(self, monkeypatch):
        world = World()
        world.configure(model("a", 4000))
        load(world, "a")
        for number in range(1000):
            world.admission.accounts.admit(TicketId(f"x{number}"), [Account(f"{number}", account(Rate(5)).limits)], 0.0)
        looked = []
        for name in ("standings", "reached", "admit"):
            monkeypatch.setattr(world.admission.accounts, name, lambda *a, name=name: looked.append(name))
        world.finish(world.request("a"))
        assert looked == []


def test_remote_that_is_down_is_told_before_the_limit():
    world = World()
    world.configure(model("far", 0, remote=True))
    world.run(5)
    world.post(WorkerUnready(ModelId("far"), record(world, "far").generation, "no route"))
    accounts = (account(Rate(1)),)
    for _ in range(3):
        assert world.rejected[world.request("far", accounts=accounts)].code is RejectCode.REMOTE_UNAVAILABLE
    assert left(world, accounts) == 1
    assert math.isfinite(world.now)
