"""How long a model stays: keep-alives, holds, the pause after a request, and who goes first."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.core.admission.waiting import wait_reason
from supervisor.core.demand import HIGH, LOW, NORMAL
from supervisor.core.events import PinRequested, UnloadRequested
from supervisor.core.types import Limits, ModelId, Policy
from tests.support.counts import examples
from tests.support.simulation import World, load, model, record

A, B = ModelId("a"), ModelId("b")
NO_RESIDENCY = Limits(min_residency_s=0.0)
MODELS_THAT_HOLD = (model("a", 10000, hold_s=20.0), model("b", 10000), model("asr", 10000, "asr"))


def answer(world: World, name: str, **demand: object) -> None:
    """One request from its arrival to its end."""
    ticket = world.request(name, **demand)
    world.run(world.load_s + 1)
    assert ticket in world.dispatched
    world.finish(ticket)


class TestKeepAliveOfARequest:
    """It keeps the model longer than its own setting, never shorter."""

    @pytest.mark.parametrize(
        ("own_s", "asked_s", "unloaded_after_s"),
        [(10.0, 60.0, 60.0), (60.0, 10.0, 60.0), (10.0, None, 10.0), (10.0, 0.0, 10.0)],
    )
    def test_the_longest_counts(self, world, own_s, asked_s, unloaded_after_s):
        world.configure(model("a", 4000, keep_alive_s=own_s))
        answer(world, "a", keep_alive_s=asked_s)
        world.run(unloaded_after_s - 0.1)
        assert world.state("a") == "ready"
        world.run(0.2)
        assert world.state("a") == "stopping"
        assert world.reasons("a")[-1] == ("stop", f"idle for {unloaded_after_s:.0f} s (keep_alive_s)")

    def test_for_ever_is_longer_than_any(self, world):
        world.configure(model("a", 4000))
        answer(world, "a", keep_alive_s=5.0)
        world.run(2000.0)
        assert world.state("a") == "ready"

    def test_it_counts_from_the_end_of_its_own_request(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        answer(world, "a", keep_alive_s=60.0)
        world.run(40.0)
        answer(world, "a")  # its own keep-alive ends in 10 s, and that of the first in 20 - 3 s
        world.run(16.0)
        assert world.state("a") == "ready"
        world.run(2.0)
        assert world.loaded() == set()

    def test_one_that_still_runs_is_not_in_force(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        long = world.request("a", keep_alive_s=100.0)
        world.run(3.0)
        world.run(200.0)
        world.finish(long)
        world.run(99.0)
        assert world.state("a") == "ready"
        world.run(2.0)
        assert world.loaded() == set()

    def test_it_does_not_keep_others_from_its_memory(self, world):
        world.configure(model("a", 10000, keep_alive_s=10.0), model("b", 10000), limits=NO_RESIDENCY)
        answer(world, "a", keep_alive_s=1000.0)
        world.run(1.0)
        load(world, "b")
        assert world.loaded() == {"b"}

    def test_nor_an_operator(self, world):
        world.configure(model("a", 4000))
        answer(world, "a", keep_alive_s=1000.0)
        world.post(UnloadRequested(A))
        assert world.state("a") == "stopping"

    def test_a_pin_suspends_it(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        answer(world, "a", keep_alive_s=20.0)
        world.post(PinRequested(A, pin=True))
        world.run(100.0)
        assert world.state("a") == "ready"
        world.post(PinRequested(A, pin=False))
        world.run(0.1)
        assert world.state("a") == "stopping"

    @settings(max_examples=examples(25))
    @given(
        own_s=st.floats(0.5, 50.0),
        requests=st.lists(
            st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 20.0), st.none() | st.floats(0.0, 80.0)),
            min_size=1,
            max_size=5,
        ),
    )
    def test_it_is_unloaded_exactly_when_the_longest_is_over(self, own_s, requests):
        world = World()
        world.configure(model("a", 4000, keep_alive_s=own_s))
        kept_until = used_at = 0.0
        for pause_s, takes_s, asked_s in requests:
            world.run(pause_s)
            ticket = world.request("a", keep_alive_s=asked_s)
            world.run(5.0 + takes_s)
            assert ticket in world.dispatched
            world.finish(ticket)
            used_at = world.now
            kept_until = max(kept_until, used_at + (asked_s or 0.0))
        expected = max(used_at + own_s, kept_until)
        world.run(expected - world.now - 0.001)
        assert world.state("a") == "ready"
        world.run(0.002)
        assert world.state("a") == "stopping"


class TestHold:
    """Within `hold_s` after its last use, only a model of higher priority takes its place."""

    @pytest.fixture
    def rivals(self, world):
        world.configure(*MODELS_THAT_HOLD, limits=NO_RESIDENCY)
        answer(world, "a")
        return world

    def test_one_of_equal_priority_waits_until_it_is_over(self, rivals):
        waiting = rivals.request("b")
        rivals.run(19.5)
        assert rivals.state("a") == "ready"
        assert "held for its next request" in rivals.reasons("b")[-1][1]
        rivals.run(4.0)
        assert waiting in rivals.dispatched

    def bulk_pass(self, world):
        """An item for `a` after each pause; whether `a` was loaded all the time."""
        for _ in range(10):
            world.run(15.0)
            item = world.request("a")
            if item not in world.dispatched:
                return False
            world.run(5.0)
            world.finish(item)
        return world.starts == ["a"]

    def test_each_use_begins_it_anew(self, rivals):
        """A bulk pass with pauses between its items never loses its model, while nobody has waited too long."""
        rivals.configure(*MODELS_THAT_HOLD, limits=Limits(min_residency_s=0.0, aging_s=math.inf))
        waiting = rivals.request("b")
        assert self.bulk_pass(rivals)
        rivals.run(24.0)
        assert waiting in rivals.dispatched

    @pytest.mark.parametrize(("priority", "aged_s"), [(NORMAL, 60), (LOW, 120)])
    def test_it_ends_when_the_waiter_has_come_before_its_class(self, rivals, priority, aged_s):
        waiting = rivals.request("b", priority)
        began = rivals.now
        assert not self.bulk_pass(rivals)
        rivals.run(30.0)
        assert waiting in rivals.dispatched
        assert record(rivals, "a").stopped_at - began == pytest.approx(aged_s, abs=6)  # an item may run at that moment

    def test_a_busy_one_is_not_drained_for_its_equal(self, rivals):
        item = rivals.request("a")
        rivals.request("b")
        rivals.run(50.0)
        assert rivals.state("a") == "ready"
        another = rivals.request("a")
        assert {item, another} <= rivals.dispatched.keys()

    def test_a_higher_priority_takes_it(self, rivals):
        urgent = rivals.request("asr")
        rivals.run(3.0)
        assert urgent in rivals.dispatched

    def test_an_operator_unloads_it(self, rivals):
        rivals.post(UnloadRequested(A))
        assert rivals.state("a") == "stopping"

    def test_the_end_of_its_keep_alive_waits_for_it(self, world):
        world.configure(model("a", 4000, hold_s=20.0, keep_alive_s=5.0))
        answer(world, "a")
        world.run(19.0)
        assert world.state("a") == "ready"
        world.run(2.0)
        assert world.loaded() == set()

    def test_a_pin_suspends_it_and_more(self, rivals):
        rivals.post(PinRequested(A, pin=True))
        refused = rivals.request("b")
        rivals.run(1.0)
        assert "pinned a" in rivals.rejected[refused].message.replace("{model}", "b")

    def test_another_idle_one_goes_instead(self, world):
        world.totals = {next(iter(world.totals)): 20512}
        world.configure(model("a", 10000, hold_s=60.0), model("c", 10000), model("b", 10000), limits=NO_RESIDENCY)
        answer(world, "c")
        answer(world, "a")
        world.run(1.0)
        load(world, "b")
        assert world.loaded() == {"a", "b"}


class TestPauseAfterARequest:
    """It lasts 2 % of the time that the model takes to load, at most `linger_s`; then another may have its place."""

    @pytest.mark.parametrize(
        ("load_s", "linger_s", "pause_s"),
        [(0.1, 0.25, 0.002), (5.0, 0.25, 0.1), (12.5, 0.25, 0.25), (100.0, 0.25, 0.25), (100.0, 0.0, 0.0)],
    )
    def test_by_load_time(self, world, load_s, linger_s, pause_s):
        world.load_s = load_s
        world.configure(model("a", 10000), model("b", 10000), limits=Limits(linger_s=linger_s, min_residency_s=1000.0))
        answer(world, "a")
        finished_at = world.now
        world.request("b")
        world.run(1.0)
        record_ = record(world, "a")
        assert record_.stopped_at - finished_at == pytest.approx(pause_s, abs=0.01)

    def test_a_next_request_within_it_keeps_the_model(self, world):
        world.load_s = 10.0
        world.configure(model("a", 10000), model("b", 10000))
        answer(world, "a")
        world.request("b")
        world.run(0.1)
        item = world.request("a")
        assert item in world.dispatched


class TestMinimumResidency:
    """A model in demand stays that long, however much others want its place."""

    def test_one_that_is_asked_for_again_and_again(self, world):
        world.configure(model("a", 10000, target_inflight=1), model("b", 10000), limits=Limits(min_residency_s=30.0))
        items = [world.request("a") for _ in range(20)]
        world.run(3.0)
        ready_at = record(world, "a").ready_at
        world.request("b")
        for item in items:
            world.run(2.0)
            if item not in world.dispatched:
                break
            world.finish(item)
        assert record(world, "a").stopped_at - ready_at == pytest.approx(30.0, abs=2.0)


class TestWhoGoesFirst:
    """Of equal priority the one goes that is cheap to reload for the time it was idle, by its own last load."""

    def three(self, world: World, *order: str) -> None:
        """A slow and a quick one, loaded and used in this order; then a third that needs the place of one."""
        specs = model("slow", 7000), model("quick", 7000), model("new", 7000)
        world.configure(*specs, limits=NO_RESIDENCY)
        for name in order:
            world.load_s = 20.0 if name == "slow" else 1.0
            load(world, name)
        world.run(20.0)
        load(world, "new")

    @pytest.mark.parametrize("order", [("slow", "quick"), ("quick", "slow")])
    def test_the_quick_one(self, world, order):
        self.three(world, *order)
        assert world.loaded() == {"slow", "new"}

    def test_the_slow_one_when_it_was_idle_for_much_longer(self, world):
        specs = model("slow", 7000), model("quick", 7000), model("new", 7000)
        world.configure(*specs, limits=NO_RESIDENCY)
        world.load_s = 20.0
        load(world, "slow")
        world.run(1000.0)
        world.load_s = 1.0
        load(world, "quick")
        load(world, "new")
        assert world.loaded() == {"quick", "new"}

    def test_a_load_time_that_an_earlier_daemon_learned_counts_before_the_first_load(self, world):
        world.configure(model("a", 10000, load_s=5.0), model("b", 10000), policy=Policy())
        assert (record(world, "a").reload_s, record(world, "b").reload_s) == (5.0, 10000 / 1024)


class TestWhoUsedItLast:
    """A less urgent request doesn't take a model from the class that used it last, for a time; aging ends that."""

    def waits(self, world: World, priority: int, most_s: float, name: str = "b") -> float:
        """After which time a request of this class makes `a` go; infinite: it doesn't."""
        began = world.now
        world.request(name, priority)
        while world.now < began + most_s:
            if world.state("a") != "ready":
                return world.now - began
            world.run(0.5)
        return math.inf

    def used(self, world: World, priority: int = NORMAL, limits: Limits = NO_RESIDENCY, **more: object) -> None:
        """`a` has just answered a request of this class."""
        asked = {"keep_alive_s": more.pop("asked_s", None)}
        world.configure(model("a", 10000, **more), model("b", 10000), model("asr", 10000, "asr"), limits=limits)
        answer(world, "a", priority=priority, **asked)

    @pytest.mark.parametrize(
        ("kept", "window_s"),
        [
            ({"own_keep_alive_s": 40.0, "keep_alive_s": 40.0}, 40),
            ({"hold_s": 50.0}, 50),
            ({"asked_s": 45.0}, 45),
            ({"asked_s": 45.0, "own_keep_alive_s": 20.0, "keep_alive_s": 20.0}, 45),
            ({"own_keep_alive_s": 10.0, "keep_alive_s": 1000.0}, 10),  # an entry's own; not the minimum residency
            ({"keep_alive_s": 1000.0}, 30),  # of its type
            ({}, 30),
        ],
    )
    def test_how_long(self, world, kept, window_s):
        self.used(world, limits=Limits(min_residency_s=30.0), **kept)
        model = record(world, "a")
        since = model.last_used if kept.keys() - {"keep_alive_s"} else model.ready_at
        began = world.now
        assert began + self.waits(world, LOW, 100) - since == pytest.approx(window_s, abs=1)
        assert world.replays()

    @pytest.mark.parametrize(("used", "asks", "aged_s"), [(HIGH, LOW, 120), (HIGH, NORMAL, 60), (NORMAL, LOW, 60)])
    def test_aging_ends_it(self, world, used, asks, aged_s):
        self.used(world, used, asked_s=500.0)
        assert self.waits(world, asks, 300) == pytest.approx(aged_s, abs=1)

    def test_without_aging_nothing_does(self, world):
        limits = Limits(min_residency_s=0.0, aging_s=math.inf)
        self.used(world, own_keep_alive_s=400.0, limits=limits)
        assert self.waits(world, LOW, 600) == pytest.approx(400, abs=1)

    @pytest.mark.parametrize(("used", "asks"), [(NORMAL, NORMAL), (LOW, NORMAL), (NORMAL, HIGH)])
    def test_nobody_else_waits_for_it(self, world, used, asks):
        self.used(world, used, asked_s=500.0)
        assert self.waits(world, asks, 10) <= 1

    def test_nor_a_model_of_higher_priority(self, world):
        self.used(world, HIGH, own_keep_alive_s=500.0)
        assert self.waits(world, LOW, 10, "asr") <= 1

    def test_each_use_begins_it_anew_until_the_waiter_has_aged(self, world):
        self.used(world, own_keep_alive_s=10.0)
        began, waiting = world.now, world.request("b", LOW)
        while world.state("a") == "ready":
            item = world.request("a")
            assert item in world.dispatched
            world.run(1.0)
            world.finish(item)
            world.run(4.0)
        assert world.now - began == pytest.approx(60, abs=6)
        world.run(5.0)
        assert waiting in world.dispatched
        assert len(world.scheduler.state.timers) < 20, "one for each use"

    def test_a_busy_one_is_not_drained_before_that(self, world):
        self.used(world, own_keep_alive_s=10.0)
        item = world.request("a")
        assert self.waits(world, LOW, 100) == pytest.approx(60, abs=1)
        assert item not in world.cut

    def test_what_is_told(self, world):
        self.used(world, limits=Limits(min_residency_s=30.0))
        world.run(5.0)
        world.request("b", LOW)
        assert world.reasons("b")[-1] == (
            "wait",
            "needs 10000 MiB on gpu0, 5872 free; waiting for a (llm, 10000 MiB, last used by a more urgent request, 5 s ago)",
        )

    def test_what_the_request_is_told(self, world):
        self.used(world, asked_s=50.0)
        world.request("b", LOW)
        assert wait_reason(world.scheduler.state, record(world, "b")).what == "a, last used by more urgent requests"

    @pytest.mark.parametrize(("later_s", "goes"), [(1.0, "low"), (59.0, "low"), (200.0, "high")])
    def test_the_least_urgent_goes_first(self, world, later_s, goes):
        """Though it was used later, and costs as much to reload. A use of long ago counts no more than the later one."""
        world.configure(model("high", 7000), model("low", 7000), model("new", 7000), limits=NO_RESIDENCY)
        answer(world, "low", priority=LOW)
        answer(world, "high", priority=HIGH)
        world.run(later_s)
        ticket = world.request("low", LOW)
        world.finish(ticket)
        world.request("new")
        assert world.state(goes) == "stopping"
        (reason,) = (reason for kind, reason in world.reasons("new") if kind == "evict")
        assert reason.endswith(f"last used with priority {LOW if goes == 'low' else HIGH})")
