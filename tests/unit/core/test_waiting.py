"""What a queued request waits for, in words that are true at that moment, and for how long still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.admission.waiting import Forecast, WaitKind, forecast, wait_reason
from supervisor.core.effects import LearnLoad
from supervisor.core.events import UnloadRequested
from supervisor.core.types import Crash, CrashClass, ModelId
from tests.support.simulation import World, load, model, rivals

A, B = ModelId("a"), ModelId("b")


@pytest.fixture
def world():
    return rivals(target_inflight=2)


def told(world, name):
    state = world.scheduler.state
    found = wait_reason(state, state.models[name])
    return found.kind, found.what, found.others


def foretold(world, name):
    state = world.scheduler.state
    return forecast(state, state.models[name], world.now)


class TestAwaited:
    """One thing at a time, the one that stands in the way now."""

    def test_load(self, world):
        world.request("a")
        world.run(1)
        assert told(world, A) == (WaitKind.LOAD, "the model to load", ())

    def test_a_free_place(self, world):
        for _ in range(3):
            world.request("b")
        world.run(6)
        assert told(world, B) == (
            WaitKind.PLACE,
            "a free place: the model answers as many requests as it may at once, or as its context holds",
            (),
        )

    def test_another_models_requests_and_end(self, world):
        ticket = world.request("a")
        world.run(40)
        world.request("b")
        assert told(world, B) == (WaitKind.DRAIN, "a to end its requests", (A,))
        world.finish(ticket)
        assert told(world, B) == (WaitKind.UNLOAD, "a to be unloaded", (A,))
        world.run(1)
        assert told(world, B)[0] is WaitKind.LOAD

    def test_another_models_turn(self, world):
        world.request("a")
        world.run(1)
        world.request("b")
        assert told(world, B) == (WaitKind.TURN, "a to load first", (A,))

    def test_the_end_of_its_own_worker(self, world):
        world.request("a")
        world.run(6)
        world.post(UnloadRequested(A))
        world.request("a")
        assert told(world, A) == (WaitKind.DRAIN, "its last worker to end its requests", ())

    def test_a_pause_after_a_crash_quotes_no_worker(self, world):
        world.request("a")
        world.run(1)
        world.crash("a", Crash(CrashClass.UNKNOWN, "it ended", quote="somebody's prompt"))
        kind, what, _ = told(world, A)
        assert (kind, what) == (WaitKind.CRASH, "the next try after a crash")
        assert foretold(world, A).text.startswith("in ")

    def test_a_turn_behind_many(self):
        world = World(load_s=60.0)
        world.configure(*(model(name, 10000) for name in "abcdefgh"))
        for name in "abcdefgh":
            world.request(name)
        kind, what, others = told(world, ModelId("h"))
        assert (kind, what) == (WaitKind.TURN, "its turn, after b, c, d and 3 more")
        assert others == tuple("bcdefg")


class TestForecast:
    """By the last load that was measured, or not at all."""

    def test_first_load(self, world):
        world.request("a")
        world.run(1)
        assert foretold(world, A) == Forecast(None, "first load with these settings, no estimate yet")

    @staticmethod
    def unloaded_again(world):
        load(world, "a")
        world.post(UnloadRequested(A, force=True))
        world.run(3)

    def test_later_load(self, world):
        self.unloaded_again(world)
        world.request("a")
        world.run(1)
        found = foretold(world, A)
        assert found.eta_s == pytest.approx(3.0, abs=0.3)
        assert found.text in {"about 3 s", "about 4 s"}

    def test_a_load_that_an_earlier_daemon_timed(self, world):
        known = replace(model("c", 4000), load_s=3.0)
        world.configure(known, replace(known, id=ModelId("d")))
        world.request("c")
        world.run(1)
        found = foretold(world, "c")
        assert (found.eta_s, found.text) == (pytest.approx(2.0, abs=0.3), "about 2 s")
        world.run(6)
        timed = LearnLoad("c", "c", pytest.approx(4.0, abs=0.3))
        assert [effect for effect in world.effects if isinstance(effect, LearnLoad)] == [timed], "the new one is kept"
        assert foretold(world, "d").text.endswith("then about 3 s")

    def test_an_overdue_load_promises_nothing(self, world):
        self.unloaded_again(world)
        world.scheduler.state.models[A].load_s = 0.5
        world.request("a")
        world.run(1)
        assert foretold(world, A) == Forecast(None, "longer than its last load, which took 1 s")

    def test_after_its_definition_changed(self, world):
        self.unloaded_again(world)
        larger = replace(model("a", 10000, definition="larger"), footprint_key="larger")
        world.configure(larger, model("b", 9000))
        world.request("a")
        world.run(1)
        assert foretold(world, A).text == "first load with these settings, no estimate yet"

    def test_behind_another_model(self, world):
        world.request("a")
        world.run(40)
        world.request("b")
        assert foretold(world, B) == Forecast(None, "then its first load with these settings, no estimate yet")
