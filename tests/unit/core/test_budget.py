"""Budgets: refused at once when they can't be kept, kept when they can, and ended in time when something came between."""

from __future__ import annotations

import math
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.core.demand import HIGH, LOW, NORMAL, AnswerTimes
from supervisor.core.effects import Dispatch, StopWorker
from supervisor.core.types import Limits, RejectCode
from tests.support.counts import examples
from tests.support.simulation import World, load, model

TEN = AnswerTimes(10.0, 10.0)


def code(world, ticket):
    return world.rejected[ticket].code if ticket in world.rejected else None


def alone(**more):
    world = World(load_s=4.0)
    world.configure(model("m", 4000, **more))
    return world


class TestTooSmall:
    """Who can't be answered in time is told so at once, with the seconds that are expected."""

    def test_a_load_that_takes_longer(self):
        world = alone(load_s=4.0)
        ticket = world.request("m", budget_s=3.0)

        assert code(world, ticket) is RejectCode.BUDGET_TOO_SMALL
        assert world.rejected[ticket].about.total_s == 4.0
        assert "about 4.0 s are expected (4.0 s to load)" in world.rejected[ticket].message
        assert world.starts == []

    def test_the_answer_counts(self):
        world = alone(load_s=4.0)
        assert code(world, world.request("m", budget_s=13.9, answers=TEN)) is RejectCode.BUDGET_TOO_SMALL
        assert code(world, world.request("m", budget_s=14.0, answers=TEN)) is None

    def test_the_rest_of_a_load_counts(self):
        world = alone(load_s=4.0)
        world.request("m")
        world.run(3)

        assert code(world, world.request("m", budget_s=0.5)) is RejectCode.BUDGET_TOO_SMALL
        assert code(world, world.request("m", budget_s=1.5)) is None

    def test_those_ahead_count_and_those_of_a_lower_class_do_not(self):
        world = alone(target_inflight=1)
        load(world, "m")
        for priority in (NORMAL, NORMAL, LOW):
            world.request("m", priority)

        assert code(world, world.request("m", budget_s=29.0, answers=TEN)) is RejectCode.BUDGET_TOO_SMALL
        assert code(world, world.request("m", budget_s=30.0, answers=TEN)) is None
        assert code(world, world.request("m", HIGH, budget_s=20.0, answers=TEN)) is None

    def test_a_loaded_model_with_room_needs_only_the_answer(self):
        world = alone(target_inflight=2)
        load(world, "m")
        world.request("m")
        ticket = world.request("m", budget_s=10.0, answers=TEN)
        assert ticket in world.dispatched


class TestUnknown:
    """What was never measured is no reason to refuse."""

    def test_a_first_load_and_a_first_answer(self):
        world = alone()
        assert code(world, world.request("m", budget_s=0.1)) is None


class TestExceeded:
    """A request whose budget is over while it waits is told so then."""

    def test_while_the_model_loads(self):
        world = alone()
        ticket, other = world.request("m", budget_s=2.0), world.request("m")
        world.run(1.9)
        assert code(world, ticket) is None
        world.run(0.2)
        assert code(world, ticket) is RejectCode.BUDGET_EXCEEDED

        world.run(3)
        assert other in world.dispatched  # whose load went on

    def test_nobody_else_waits_for_the_load(self):
        world = alone()
        world.request("m", budget_s=2.0)
        world.run(2.5)
        assert any(isinstance(effect, StopWorker) for effect in world.effects)

    def test_what_runs_is_not_cut(self):
        world = alone()
        load(world, "m")
        ticket = world.request("m", budget_s=1.0)
        world.run(5)
        assert ticket in world.dispatched
        assert world.cut == []

    def test_the_patience_of_all_comes_first(self):
        world = World(load_s=100.0)
        world.configure(model("m", 4000), limits=Limits(queue_wait_s=5.0))
        ticket = world.request("m", budget_s=50.0)
        world.run(6)
        assert code(world, ticket) is RejectCode.QUEUE_TIMEOUT

    def test_a_recording_gives_the_same_again(self):
        world = alone()
        world.request("m", budget_s=2.0)
        world.run(3)
        world.request("m", budget_s=2.0, answers=TEN)
        assert world.replays()


class Punctual(World):
    """A world whose answers take five seconds each."""

    def _carry_out(self, effect):
        super()._carry_out(effect)
        if isinstance(effect, Dispatch):
            self.later(5.0, partial(self.finish, effect.ticket))


class TestPromise:
    """What was admitted with a budget is answered within it, as long as loads and answers take what they took before."""

    @settings(max_examples=examples(100))
    @given(
        st.lists(
            st.tuples(
                st.floats(0.0, 8.0), st.sampled_from([HIGH, NORMAL, LOW]), st.sampled_from([None, 3.0, 9.0, 20.0, 60.0])
            ),
            max_size=20,
        ),
        st.integers(1, 3),
    )
    def test_nobody_who_came_later_with_no_higher_class_breaks_it(self, arrivals, places):
        world = Punctual(load_s=4.0)
        world.configure(model("m", 4000, load_s=4.0, target_inflight=places))
        promised = {}
        for pause_s, priority, budget_s in arrivals:
            world.run(pause_s)
            ticket = world.request("m", priority, budget_s=budget_s, answers=AnswerTimes(5.0, 5.0))
            if priority == HIGH and budget_s is not None and ticket not in world.rejected:
                promised[ticket] = world.now + budget_s
        while world.open:
            world.run(0.5)
            late = [ticket for ticket in world.open if world.now > promised.get(ticket, math.inf) + 0.5 + 0.01]
            assert late == []
        assert not {RejectCode.BUDGET_EXCEEDED} & {code(world, ticket) for ticket in promised}
