"""What only time brings, and what it must not bring: idle models, half-loaded ones, old crashes, words about nobody."""

from __future__ import annotations

import pytest

from supervisor.core.effects import StopWorker
from supervisor.core.events import LoadRequested, PinRequested, UnloadRequested, WorkerReady, WorkerUnready
from supervisor.core.types import Crash, CrashClass, Limits, ModelId
from tests.support.simulation import GPU, World, load, model, record

A = ModelId("a")


@pytest.fixture
def world():
    return World()


def kinds(world, name="a"):
    return [kind for kind, _ in world.reasons(name)]


class TestKeepAlive:
    """`keep_alive_s` ends a model that nobody used, and no other."""

    def test_a_pinned_model_stays_until_it_is_unpinned(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        load(world, "a")
        world.post(PinRequested(A, pin=True))
        world.run(30)
        assert world.loaded() == {"a"}
        world.post(PinRequested(A, pin=False))
        world.run(1)
        assert world.loaded() == set()

    def test_a_model_that_does_not_answer_while_requests_wait_is_not_idle(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        load(world, "a")
        key = record(world, "a").holder
        world.post(WorkerUnready(*key, "probe failed"))
        world.run(5)
        ticket = world.request("a")
        world.run(12)
        assert world.state("a") == "ready"
        world.post(WorkerReady(*key))
        assert ticket in world.dispatched
        world.finish(ticket)
        world.run(11)
        assert world.state("a") == "stopped"

    def test_its_reason(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        load(world, "a")
        world.run(11)
        assert world.reasons("a")[-1] == ("stop", "idle for 10 s (keep_alive_s)")

    def test_a_timer_of_a_forgotten_model(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        load(world, "a")
        world.configure()
        world.run(20)
        assert not world.scheduler.state.models


class TestGivingUp:
    """A load that an operator asked for waits as long as a request."""

    def test_it_says_so(self, world):
        world.configure(model("a", 12000), model("b", 12000), limits=Limits(queue_wait_s=20.0))
        world.request("b")
        world.run(3)
        world.post(LoadRequested(A))
        world.run(19)
        assert "give_up" not in kinds(world)
        world.run(2)
        assert kinds(world)[-1] == "give_up"
        assert record(world, "a").life.reason == "it was asked for and got no place within 20 s"

    def test_not_while_it_loads(self, world):
        world.load_s = 30.0
        world.configure(model("a", 4000), limits=Limits(queue_wait_s=20.0))
        world.post(LoadRequested(A))
        world.run(31)
        assert world.loaded() == {"a"}


class TestCancelledLoads:
    """A load that nobody wants any more is cancelled, unless most of it is done."""

    @pytest.mark.parametrize(("after_s", "loaded"), [(4.0, False), (6.0, True)])
    def test_by_how_far_it_is(self, world, after_s, loaded):
        world.load_s = 10.0
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(11)
        world.finish(ticket)
        world.post(UnloadRequested(A))
        world.run(2)
        again = world.request("a")
        world.run(after_s)
        world.finish(again)
        world.run(15)
        assert (world.loaded() == {"a"}) is loaded
        assert ("cancel" in kinds(world)) is not loaded

    def test_one_that_was_never_timed_is_cancelled(self, world):
        world.load_s = 10.0
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(9)
        world.finish(ticket)
        assert world.state("a") == "stopping"


class TestCrashes:
    """Crashes are forgotten after a long time of service."""

    def test_after_a_long_service(self, world):
        world.configure(model("a", 4000), limits=Limits(backoff_reset_s=50.0, crash_window_s=10_000.0))
        load(world, "a")
        world.crash("a", Crash(CrashClass.UNKNOWN, "it fell"))
        world.run(10)
        assert len(record(world, "a").crashes.times) == 1
        world.run(45)
        assert record(world, "a").crashes.times == ()


class TestWordsAboutNobody:
    """Operators and probes may be late, or wrong."""

    def test_a_model_that_does_not_exist(self, world):
        nobody = ModelId("nobody")
        world.configure(model("a", 4000))
        for event in (UnloadRequested(nobody), PinRequested(nobody, pin=True), LoadRequested(nobody)):
            world.post(event)
        assert set(world.scheduler.state.models) == {"a"}

    def test_force_hurries_a_stop(self, world):
        world.exit_s = 100.0
        world.configure(model("a", 4000))
        load(world, "a")
        world.post(UnloadRequested(A))
        world.post(UnloadRequested(A, force=True))
        stops = [effect.force for effect in world.effects if isinstance(effect, StopWorker)]
        assert stops == [False, True]

    def test_force_after_it_is_gone_stops_nothing(self, world):
        world.return_s = 100.0
        world.configure(model("a", 4000))
        load(world, "a")
        world.post(UnloadRequested(A))
        world.run(1)
        assert record(world, "a").exited
        world.post(UnloadRequested(A, force=True))
        assert len([effect for effect in world.effects if isinstance(effect, StopWorker)]) == 1

    def test_a_device_that_is_taken_away_while_memory_returns(self, world):
        world.return_s = 100.0
        world.configure(model("a", 4000))
        load(world, "a")
        world.post(UnloadRequested(A))
        world.run(1)
        assert world.scheduler.state.ledger.holds_any(A)
        world.totals = {}
        world.configure(model("a", 4000))
        assert not world.scheduler.state.ledger.holds_any(A)
        assert GPU not in world.scheduler.state.ledger.device_ids()
        assert world.state("a") == "stopped"
