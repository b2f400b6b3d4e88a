"""What is known of the clients: counted, bounded, and paused."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.catalog.keys import Key, Keyring, Scope
from supervisor.catalog.sections.clients import ClientConfig
from supervisor.core.demand import Demand
from supervisor.daemon.clients import KEPT, OTHER, Clients, Cooldown, CooldownRule
from supervisor.dialects.openai import OPENAI
from supervisor.engine.ticket import Ticket
from supervisor.errors import LlmuxError, NotFoundError, RateLimitError, UnavailableError
from supervisor.gateway.attempt import Usage
from supervisor.gateway.request import Request

GAPS = st.lists(st.integers(0, 40), max_size=60)
BURSTS = st.integers(1, 8)
WINDOW_S = 60
START = 1_000_000.0


class World:
    """As much of a daemon as the clients see."""

    def __init__(self, profiles=None, keys=()):
        self.now = 100.0
        self.engine = SimpleNamespace(clock=lambda: self.now)
        self.requests = SimpleNamespace(observers=[], listeners=[], by_tenant=Counter, record=lambda: None)
        self.on_configure = []
        self.keyring = Keyring(tuple(keys))
        self.wall_time = lambda at: at + 1e9
        self.clients = Clients(self)
        self.configure(profiles or {})

    def configure(self, profiles):
        self.catalog = SimpleNamespace(clients=profiles)
        for listener in self.on_configure:
            listener()

    def ask(self, tenant, status=200, error=None, *, worker=True, **usage):
        """A request that was let through, and what came of it."""
        context = Request(b"1", self.now, OPENAI, demand=Demand(tenant=tenant))
        self.clients.arrived(tenant)
        context.attempt.ticket = Ticket("1", "a", self.now) if worker else None
        context.attempt.outcome.status, context.usage = status, Usage(**usage)
        context.failure, context.ended_at = error, self.now
        for observer in self.requests.observers:
            observer(context)
        for listener in self.requests.listeners:
            listener([context])

    def counts(self, tenant):
        view = self.clients.view(tenant)
        return view.requests, view.errors, view.refused


class TestCounts:
    """Requests, failures, refusals and tokens, and when they came."""

    def test_outcomes(self):
        world = World()
        for status in (200, 400, 500):
            world.ask("a", status, prompt=5, completion=2)
        world.ask("a", 200, "upstream_broken")
        for status in (429, 503, 504):
            world.ask("a", status, "queue_full", worker=False)
        world.ask("a", 503, "upstream_error")  # a worker's own answer
        for error in ("client_gone", "request_cancelled", "handed_over"):
            world.ask("a", 0, error)
        assert world.counts("a") == (11, 4, 3)
        view = world.clients.view("a")
        assert (view.prompt_tokens, view.completion_tokens) == (15, 6)

    def test_when(self):
        world = World()
        world.ask("a")
        world.now = 160.0
        world.ask("a")
        view = world.clients.view("a")
        assert (view.first_seen, view.last_seen) == (1e9 + 100, 1e9 + 160)

    def test_who_said_nothing_is_no_client(self):
        world = World()
        world.clients.finished(Request(b"1", 0.0, OPENAI))
        assert world.clients.views() == []


class TestBound:
    """Of those without a profile the last ones are kept."""

    def test_who_came_last_stays(self):
        world = World({"vip": ClientConfig(priority="high")})
        world.ask("vip")
        for number in range(KEPT + 50):
            world.ask(f"c{number}")
            world.ask("c0")
        names = [view.id for view in world.clients.views()]
        assert len(names) == KEPT + 1
        assert names[0] == "c0"
        assert {"vip", f"c{KEPT + 49}"} < set(names)
        assert "c1" not in names

    def test_forgotten(self):
        world = World()
        world.ask("a", 500)
        world.clients.forget("a")
        with pytest.raises(NotFoundError):
            world.clients.forget("a")
        world.ask("a")
        assert world.counts("a") == (1, 0, 0)


class TestPause:
    """A client that has to pause is refused until it is over; others aren't."""

    RULE = ClientConfig(cooldown_errors=2, cooldown_s=30.0)

    def test_after_errors(self):
        world = World({"a": self.RULE})
        for tenant in "ab":
            for _ in range(2):
                world.ask(tenant, 500)
        with pytest.raises(
            RateLimitError, match=r"a has to pause: 2 of its requests failed in a row. Try again in 30 s"
        ):
            world.ask("a")
        world.ask("b")
        assert world.clients.view("a").cooldown_s == 30.0
        world.now += 30.0
        world.ask("a")
        assert world.clients.view("a").cooldown_s is None

    def test_the_default_is_for_who_has_no_profile(self):
        world = World({"default": ClientConfig(cooldown_burst=1)})
        world.ask("a")
        with pytest.raises(RateLimitError) as caught:
            world.ask("a")
        assert (caught.value.code, caught.value.retry_after_s, caught.value.lasts) == ("client_cooldown", 30.0, False)

    def test_a_long_one_lasts(self):
        world = World()
        world.ask("a")
        world.clients.pause("a", 3600.0)
        with pytest.raises(LlmuxError) as caught:
            world.ask("a")
        assert caught.value.lasts
        world.clients.pause("a", 0.0)
        world.ask("a")

    def test_a_reload_changes_the_rule(self):
        world = World({"a": self.RULE})
        world.configure({})
        for _ in range(9):
            world.ask("a", 500)
        assert world.clients.view("a").cooldown_s is None

    def test_a_worker_that_was_stopped_is_nobodys_failure(self):
        world = World({"a": self.RULE})
        for _ in range(4):
            world.clients.arrived("a")
            context = Request(b"1", world.now, OPENAI, demand=Demand(tenant="a"))
            context.attempt.ticket = Ticket("1", "a", 0.0)
            context.attempt.ticket.cut("unloaded")
            context.fail(UnavailableError("It was unloaded."))
            world.clients.finished(context)
        assert world.counts("a") == (4, 0, 0)


class TestViews:
    """Who came last is the first; profiles are shown before their client came."""

    def test_order(self):
        world = World({"default": ClientConfig(), "vip": ClientConfig(priority="high")})
        for tenant in ("a", "b", "a"):
            world.ask(tenant)
        views = world.clients.views()
        assert [view.id for view in views] == ["a", "b", "vip"]
        assert (views[-1].last_seen, views[-1].profile["priority"]) == (None, "high")
        assert views[0].profile is None

    def test_metrics_name_those_that_are_configured(self):
        keys = [Key(name, b"", frozenset({Scope.INFERENCE}), tenant=tenant) for name, tenant in (("k", ""), ("l", "t"))]
        world = World({"default": ClientConfig(), "vip": ClientConfig()}, keys)
        labels = [world.clients.label(name) for name in ("vip", "k", "t", "l", "default", "who")]
        assert labels == ["vip", "k", "t", OTHER, OTHER, OTHER]


def most_in_a_window(times: list[int]) -> int:
    """Half open, as the bucket runs: what comes a whole window later is in the next one."""
    return max((sum(first <= time < first + WINDOW_S for time in times) for first in times), default=0)


class TestCooldownAfterBursts:
    """Whoever keeps within it never pauses; whoever sends more than twice as many surely does."""

    @given(GAPS, BURSTS)
    @example([0, 0, 60, 0], 2)
    def test_who_keeps_within_it(self, gaps, burst):
        times = [*accumulate(gaps)]
        cooldown, rule = Cooldown(), CooldownRule(burst=burst, window_s=WINDOW_S)
        pauses = [cooldown.arrived(rule, START + time) for time in times]
        if most_in_a_window(times) <= burst:
            assert not any(pauses)

    @given(GAPS, BURSTS)
    def test_who_sends_far_more(self, gaps, burst):
        times = [*accumulate(gaps)]
        cooldown, rule = Cooldown(), CooldownRule(burst=burst, window_s=WINDOW_S)
        pauses = [cooldown.arrived(rule, START + time) for time in times]
        if most_in_a_window(times) > 2 * burst:
            assert any(pauses)

    def test_at_once(self):
        cooldown, rule = Cooldown(), CooldownRule(burst=3, window_s=60, pause_s=30)
        assert [cooldown.arrived(rule, START) for _ in range(5)] == [0, 0, 0, 30, 30]
        assert cooldown.reason == "it sent more than 3 requests within 60 s"


class TestCooldownAfterErrors:
    """So many failures in a row begin a pause; a success between them doesn't."""

    @given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
    def test_in_a_row(self, outcomes, limit):
        cooldown, rule = Cooldown(), CooldownRule(errors=limit, pause_s=0.5)
        row = 0
        for second, failed in enumerate(outcomes):
            now = START + second
            cooldown.ended(rule, now, failed=failed)
            row = row + 1 if failed else 0
            assert cooldown.left_s(now) == (0.5 if row == limit else 0)
            row %= limit


class TestCooldown:
    """It has one length, whatever is refused or fails meanwhile; after it everything is counted anew."""

    @given(GAPS, st.lists(st.booleans(), min_size=60, max_size=60))
    def test_length(self, gaps, outcomes):
        cooldown, rule = Cooldown(), CooldownRule(errors=2, burst=3, window_s=WINDOW_S, pause_s=30)
        begun = None
        for time, failed in zip(accumulate(gaps), outcomes, strict=False):
            now = START + time
            before = cooldown.until
            if cooldown.arrived(rule, now) == 0:
                cooldown.ended(rule, now, failed=failed)
            if cooldown.until != before:
                assert begun is None or now >= begun + 30, "a pause doesn't begin within another"
                assert cooldown.until == now + 30
                begun = now

    def test_what_was_under_way_counts_for_nothing(self):
        cooldown, rule = Cooldown(), CooldownRule(errors=2, pause_s=30)
        for _ in range(9):
            cooldown.ended(rule, START, failed=True)
        assert cooldown.until == START + 30
        cooldown.ended(rule, START + 31, failed=True)
        assert cooldown.left_s(START + 31) == 0

    def test_an_operator_ends_it(self):
        cooldown, rule = Cooldown(), CooldownRule(burst=1)
        assert [cooldown.arrived(rule, START) for _ in range(2)] == [0, 30]
        cooldown.pause(START + 1, 0, "")
        assert cooldown.arrived(rule, START + 1) == 0

    @given(GAPS)
    def test_no_rule(self, gaps):
        cooldown = Cooldown()
        for time in accumulate(gaps):
            assert cooldown.arrived(CooldownRule(), START + time) == 0
            cooldown.ended(CooldownRule(), START + time, failed=True)
