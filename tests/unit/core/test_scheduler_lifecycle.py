"""Crashes, keep-alive, preloading, operators and reloads, where they meet each other or a running request."""

from __future__ import annotations

import pytest

from supervisor.core.events import (
    LoadRequested,
    Respecified,
    UnloadRequested,
    WorkerUnkillable,
)
from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    Generation,
    Limits,
    ModelId,
    Policy,
    RejectCode,
    WorkerState,
)
from tests.support.counts import times
from tests.support.simulation import GPU, load, model, record

A, B, ONE = ModelId("a"), ModelId("b"), Generation(1)
GPU1 = DeviceId("gpu1")
UNKNOWN = Crash(CrashClass.UNKNOWN, "exited with 3", ("last line",), 3)


class TestCrashes:
    """Whatever class a crash has, there is a next state for it."""

    @pytest.mark.parametrize("kind", CrashClass)
    @pytest.mark.parametrize("after_s", [1.0, 3.0])
    def test_of_any_class_at_any_time(self, world, kind, after_s):
        world.configure(model("a", 4000))
        world.request("a")
        world.run(after_s)
        world.crash("a", Crash(kind, "crashed"))
        ticket = world.request("a")
        world.run(10)
        assert ticket in world.dispatched or ticket in world.rejected

    def test_a_large_crash_limit_is_reached(self, world):
        world.crash_on_start = lambda _name: UNKNOWN
        world.load_s = 0.1
        limits = Limits(crash_limit=40, backoff_max_s=1.0, queue_wait_s=1000.0)
        world.configure(model("a", 4000), limits=limits)
        ticket = world.request("a")
        world.run(100)
        assert world.rejected[ticket].code is RejectCode.MODEL_FAILED

    def test_a_late_word_that_it_can_not_be_killed(self, world):
        world.configure(model("a", 4000))
        load(world, "a")
        world.return_s = 3.0
        world.post(UnloadRequested(A))
        world.run(1)
        assert world.alive == {}
        world.post(WorkerUnkillable(A, ONE, "still there"))
        ticket = world.request("a")
        world.run(10)
        assert ticket in world.dispatched

    def test_a_preloaded_model_is_tried_again_after_a_crash(self, world):
        crashes = [UNKNOWN]
        world.crash_on_start = lambda _name: crashes.pop() if crashes else None
        world.configure(model("a", 4000, preload=True))
        world.run(10)
        assert world.state("a") == "ready"


class TestKeepAlive:
    """The idle time counts from the end of the last request."""

    @pytest.mark.parametrize("keep_alive_s", [0.0, 0.001])
    def test_never_takes_a_worker_from_a_running_request(self, world, keep_alive_s):
        world.configure(model("a", 4000, keep_alive_s=keep_alive_s))
        ticket = world.request("a")
        world.run(10)
        assert world.state("a") == "ready"
        world.finish(ticket)
        world.run(1)
        assert world.state("a") == "stopped"

    def test_given_by_a_reload_counts_for_what_is_loaded(self, world):
        world.configure(model("a", 4000))
        load(world, "a")
        world.configure(model("a", 4000, keep_alive_s=10.0))
        world.run(15)
        assert world.state("a") == "stopped"

    def test_counts_anew_after_a_crash(self, world):
        """Also where the time it would have been looked at passed while it was not ready."""
        crashes = [UNKNOWN] * 3
        world.configure(model("a", 4000, keep_alive_s=5.0))
        load(world, "a")
        world.crash_on_start = lambda _name: crashes.pop() if crashes else None
        world.crash("a", UNKNOWN)
        world.run(40)
        assert crashes == []
        assert world.state("a") == "stopped"

    def test_counts_anew_after_a_drain_that_ended_without_a_stop(self, world):
        world.configure(model("a", 10000, keep_alive_s=40.0), model("b", 10000))
        load(world, "a")
        running = world.request("a")
        world.run(35)
        waiting = world.request("b")
        assert world.state("a") == "draining"
        world.run(20)
        world.finish(waiting)
        assert world.state("a") == "ready"
        world.finish(running)
        world.run(41)
        assert world.state("a") == "stopped"

    def test_timers_do_not_pile_up(self, world):
        world.configure(model("a", 4000, keep_alive_s=50.0), model("b", 8000), model("c", 15000))
        load(world, "b")
        kept = world.request("a")
        world.run(3)
        world.request("c")
        for _ in range(times(200, 600)):
            ticket = world.request("a")
            world.finish(ticket)
            world.run(0.3)
        assert len(world.scheduler.state.timers) < 50
        world.finish(kept)


class TestPreload:
    """Preloading takes the room there is and no one's place."""

    def test_more_than_fit(self, world):
        models = [model(name, 6000, preload=True) for name in "abcd"]
        world.configure(*models, model("voice", 6000, "tts", preload=True))
        world.run(30)
        assert world.loaded() == {"voice", "a"}
        assert len(world.starts) == 2

    def test_is_kept_when_a_request_comes_and_goes_meanwhile(self, world):
        world.configure(model("a", 4000, preload=True))
        ticket = world.request("a")
        world.run(0.5)
        world.finish(ticket)
        world.run(3)
        assert world.state("a") == "ready"

    def test_by_a_reload(self, world):
        world.configure(model("a", 4000))
        world.configure(model("a", 4000, preload=True))
        world.run(3)
        assert world.state("a") == "ready"


class TestOperators:
    """What is asked for ends: in a loaded model, or in a reason why not."""

    def test_a_load_that_can_not_begin_is_given_up_and_frees_its_victim(self, world):
        world.configure(model("a", 10000), model("b", 10000), limits=Limits(queue_wait_s=100.0))
        world.request("a")
        world.run(35)
        world.post(LoadRequested(B))
        assert world.state("a") == "draining"
        world.run(101)
        assert world.state("a") == "ready"
        assert record(world, "b").asked_at is None
        assert "100 s" in record(world, "b").life.reason

    def test_a_change_that_is_taken_back_and_a_load_leave_nothing_asked_for(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.post(Respecified(model("a", 5000, definition="new")))
        world.post(LoadRequested(A))
        world.post(Respecified(model("a", 4000)))
        world.post(LoadRequested(A))
        assert world.state("a") == "ready"
        world.finish(ticket)
        world.post(UnloadRequested(A))
        world.run(5)
        assert world.state("a") == "stopped"

    def test_a_model_unloaded_by_hand_stays_unloaded_when_its_configuration_changes(self, world):
        world.configure(model("a", 4000))
        load(world, "a")
        world.exit_s = 2.0
        world.post(UnloadRequested(A))
        world.configure(model("a", 4000, definition="new"))
        world.run(10)
        assert world.state("a") == "stopped"
        assert world.starts == ["a"]


class TestReload:
    """A reload takes effect at once wherever it can."""

    def test_more_room_in_a_worker_is_used(self, world):
        world.configure(model("a", 4000, target_inflight=1))
        world.request("a")
        second = world.request("a")
        world.run(3)
        assert second not in world.dispatched
        world.configure(model("a", 4000, target_inflight=2))
        assert second in world.dispatched

    def test_a_model_that_may_no_longer_run_where_it_runs_moves(self, world):
        world.totals = {GPU: 16384, GPU1: 16384}
        world.configure(model("a", 4000, devices=(GPU,)))
        load(world, "a")
        world.configure(model("a", 4000, devices=(GPU1,)))
        world.run(5)
        assert record(world, "a").devices == (GPU1,)
        assert record(world, "a").state is WorkerState.READY

    def test_a_limit_by_type_that_shrinks_below_what_waits(self, world):
        world.configure(model("a", 1000), model("b", 1000), model("c", 1000))
        load(world, "a")
        load(world, "b")
        world.configure(model("a", 1000), model("b", 1000), model("c", 1000), policy=Policy(max_loaded={"llm": 1}))
        load(world, "c")
        assert world.loaded() == {"c"}
