"""What a model's state can be: the table of transitions, and the check that finds an illegal combination."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.model_state import Change, Drain, Life, LoadIntent, ModelState
from supervisor.core.types import HAS_WORKER, Crash, CrashClass, ModelId, StopCause, WorkerState
from supervisor.core.workers.lifecycle import TABLE, ImpossibleTransitionError, Trigger, advance
from tests.support.cases import cases
from tests.support.simulation import World, model

A = ModelId("a")


@pytest.fixture
def busy() -> World:
    """A model with one request in flight."""
    world = World()
    world.configure(model("a", 4000, keep_alive_s=10.0))
    world.request("a")
    world.run(3)
    return world


class TestTransitions:
    """Only what the table has can happen."""

    @cases("state", WorkerState)
    @cases("trigger", Trigger)
    def test_what_is_not_in_it_raises_and_changes_nothing(self, state, trigger):
        if (state, trigger) in TABLE:
            return
        subject = ModelState(model("a", 4000), Life(0.0))
        subject.life.enter(state, "test", 1.0, "put there")
        before = replace(subject)
        with pytest.raises(ImpossibleTransitionError, match=f"a: {trigger} in {state}.*story:\n.*put there"):
            advance(subject, trigger, 2.0, "now")
        assert subject == before
        assert (subject.state, subject.life.since) == (state, 1.0)

    def test_every_state_is_reached_and_left(self):
        assert {transition.to for transition in TABLE.values()} == set(WorkerState) == {start for start, _ in TABLE}

    def test_which_begin_and_end_a_worker(self):
        rows = [
            (start in HAS_WORKER, transition.to in HAS_WORKER, trigger)
            for (start, trigger), transition in TABLE.items()
        ]
        assert {trigger for had, has, trigger in rows if has and not had} == {Trigger.START}
        assert {trigger for had, has, trigger in rows if had and not has} == {
            Trigger.RELEASED,
            Trigger.CRASH,
            Trigger.FAIL,
        }


class TestCheck:
    """An illegal combination is found, and the error tells the worker's story."""

    @staticmethod
    def breaches(world: World) -> str:
        with pytest.raises(AssertionError) as caught:
            world.scheduler.state.check()
        assert "-> starting" in str(caught.value)
        return str(caught.value)

    def test_all_is_well(self, busy):
        busy.scheduler.state.check()

    @pytest.mark.parametrize(
        ("values", "law"),
        [
            ({"worker": None}, "a worker iff the state has one"),
            ({"drain": Drain(StopCause.OPERATOR, "x", 1.0, 2.0)}, "a drain iff DRAINING"),
            ({"load_intent": LoadIntent(asked_at=1.0)}, "wished for although it is ready"),
            ({"claimed_by": ModelId("b")}, "claimed by a model that does not wait for it"),
            ({"change": Change(None)}, "a change waits for a worker that goes"),
            ({"keep_alive_at": 1.0}, "a time that no timer waits for"),
        ],
    )
    def test_of_a_ready_model(self, busy, values, law):
        for name, value in values.items():
            setattr(busy.scheduler.state.models[A], name, value)
        assert law in self.breaches(busy)

    def test_of_a_crash_history(self, busy):
        subject = busy.scheduler.state.models[A]
        subject.crashes = replace(subject.crashes, last=Crash(CrashClass.UNKNOWN, "x"))
        assert "a start forgets the last crash" in self.breaches(busy)
        subject.crashes = replace(subject.crashes, last=None, retry_at=1.0)
        assert "a time to retry only after a crash" in self.breaches(busy)
