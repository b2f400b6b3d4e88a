"""What a hostile reading of the scheduler found: waits without an end, memory wrongly judged, states that can't follow."""

from __future__ import annotations

import pytest

from supervisor.core.effects import Learn
from supervisor.core.events import (
    Configured,
    DeviceSample,
    LoadAsked,
    MemorySampled,
    Respecified,
    UnloadAsked,
    WorkerExited,
    WorkerSample,
    WorkerUnkillable,
)
from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    DeviceSpec,
    Footprint,
    FootprintSource,
    Generation,
    Limits,
    ModelId,
    Policy,
    RejectCode,
    WorkerState,
)
from tests.core.simulation import GPU, World, model

A, B, ONE = ModelId("a"), ModelId("b"), Generation(1)
GPU1 = DeviceId("gpu1")
UNKNOWN = Crash(CrashClass.UNKNOWN, "exited with 3", ("last line",), 3)


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.replays(), "a replay decides the same"


def guessed(name: str, mib: int, **more: object):
    """A model whose footprint is an estimate, so that measurements count."""
    spec = model(name, mib, **more)
    object.__setattr__(spec, "footprint", Footprint(mib, FootprintSource.COMPUTED))
    return spec


def load(world: World, name: str) -> None:
    ticket = world.request(name)
    world.run(3)
    assert ticket in world.dispatched
    world.finish(ticket)
    world.run(1)


def record(world: World, name: str):
    return world.scheduler.state.models[ModelId(name)]


class TestMemoryThatIsBackAtTheExit:
    """Host memory is back when its process is gone, but what is free is still what a reading shows."""

    def test_two_that_do_not_fit_take_turns(self):
        world = World(returns_at_exit=True)
        world.configure(model("a", 10000), model("b", 10000))
        for name in "abab":
            load(world, name)
        assert world.rejected == {}
        assert world.starts == ["a", "b", "a", "b"]

    def test_a_reading_that_began_before_the_exit_frees_nothing(self):
        world = World(returns_at_exit=True)
        world.configure(model("a", 10000), model("b", 10000))
        load(world, "a")
        before = MemorySampled(
            (DeviceSample(GPU, 6384, outside_mib=0),), (WorkerSample(A, ONE, GPU, 10000),), world.now
        )
        ticket = world.request("b")
        world.now += 0.1
        world._exited((A, ONE), None)
        world.post(before)
        assert ticket not in world.rejected
        world.run(3)
        assert ticket in world.dispatched

    def test_a_device_that_is_not_read_any_more_gives_its_leases_back_at_the_exit(self, world):
        world.totals = {GPU: 16384, GPU1: 16384}
        world.return_s = 1e9
        world.configure(model("a", 4000, devices=(GPU1,)))
        load(world, "a")
        world.post(Configured((model("b", 4000),), (DeviceSpec(GPU, 16384, 512),)))
        del world.totals[GPU1]
        world.run(3)
        assert A not in world.scheduler.state.models

    def test_also_when_the_worker_was_gone_before_the_device(self, world):
        world.totals = {GPU: 16384, GPU1: 16384}
        world.return_s = 1e9
        world.configure(model("a", 4000, devices=(GPU1,)))
        load(world, "a")
        world.post(UnloadAsked(A))
        world.run(3)
        assert world.state("a") == "stopping"
        world.post(Configured((model("a", 4000),), (DeviceSpec(GPU, 16384, 512),)))
        del world.totals[GPU1]
        world.run(1)
        assert world.state("a") == "stopped"


class TestClaims:
    """A victim is drained for one waiter and stopped when its last request ends."""

    def test_two_waiters_for_one_young_victim(self, world):
        world.configure(model("v", 10000), model("high", 8000, "asr"), model("low", 7000))
        running = world.request("v")
        world.run(3)
        high = world.request("high")  # may take a young model's place
        low = world.request("low")  # may not, but fits into what v leaves over
        assert world.state("v") == "draining"
        late = world.request("v")
        assert late not in world.dispatched
        world.run(1)
        world.finish(running)
        world.run(6)
        assert {high, low} <= world.dispatched.keys()

    def test_a_draining_worker_always_has_something_to_drain(self, world):
        world.configure(model("v", 10000), model("high", 8000, "asr"), model("low", 7000))
        running = world.request("v")
        world.run(3)
        world.request("low")
        high = world.request("high")
        world.finish(running)
        world.run(6)
        assert high in world.dispatched

    def test_a_model_asked_for_while_it_is_drained_for_another_comes_back(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = world.request("a")
        world.run(35)
        waiting = world.request("b")
        assert world.state("a") == "draining"
        world.post(LoadAsked(A))
        world.run(1)
        world.finish(running)
        world.run(4)
        assert waiting in world.dispatched
        world.finish(waiting)
        world.run(4)
        assert world.loaded() == {"a"}

    def test_and_is_not_remembered_as_asked_for_when_it_never_left(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = world.request("a")
        world.run(35)
        waiting = world.request("b")
        world.post(LoadAsked(A))
        world.finish(waiting)
        assert world.state("a") == "ready"
        world.finish(running)
        world.post(UnloadAsked(B))
        load(world, "b")
        assert world.loaded() == {"b"}
        world.post(UnloadAsked(B))
        world.run(5)
        assert world.loaded() == set()


class TestLearning:
    """What a ready worker was seen to take is used next time, within reason."""

    def test_nothing_is_learned_from_an_empty_tree(self, world):
        world.configure(guessed("a", 4000))
        world.request("a")
        world.run(2.1)
        world.post(MemorySampled((DeviceSample(GPU, 12384),), (WorkerSample(A, ONE, GPU, 0),), world.now))
        world.crash("a", UNKNOWN)
        ticket = world.request("a")
        world.run(10)
        assert ticket in world.dispatched

    def test_nor_from_a_reading_that_began_while_it_was_loading(self, world):
        world.configure(guessed("a", 4000))
        world.request("a")
        world.run(1.99)
        early = MemorySampled((DeviceSample(GPU, 16000),), (WorkerSample(A, ONE, GPU, 384),), world.now)
        world.run(0.02)
        assert world.state("a") == "ready"
        world.post(early)
        assert [effect for effect in world.effects if isinstance(effect, Learn)] == []

    def test_nor_from_an_older_worker(self, world):
        world.configure(guessed("a", 4000))
        load(world, "a")
        world.crash("a", UNKNOWN)
        world.run(5)
        assert record(world, "a").generation == 2
        world.post(MemorySampled((DeviceSample(GPU, 12384),), (WorkerSample(A, ONE, GPU, 9000),), world.now))
        assert all(effect.mib == 4000 for effect in world.effects if isinstance(effect, Learn))

    @pytest.mark.parametrize("mib", [0, 1, 16000, 100000])
    def test_whatever_the_store_says_it_can_be_loaded(self, world, mib):
        spec = guessed("a", 4000, learned={GPU: Footprint(mib, FootprintSource.LEARNED)})
        world.configure(spec)
        ticket = world.request("a")
        world.run(3)
        assert ticket in world.dispatched

    def test_the_retry_after_running_out_of_memory_asks_for_no_more_than_there_is(self, world):
        crashes = [Crash(CrashClass.OUT_OF_MEMORY, "out of memory")]
        world.crash_on_start = lambda _name: crashes.pop() if crashes else None
        world.configure(model("a", 14000))
        ticket = world.request("a")
        world.run(10)
        assert ticket in world.dispatched


class TestForgetting:
    """A removed model is gone without a trace, and no sooner than all its memory."""

    def test_memory_of_an_older_worker_that_never_came_back(self, world):
        world.totals = {GPU: 16384, GPU1: 16384}
        world.configure(model("a", 10000), model("b", 10000))
        load(world, "a")
        world.return_s = 1e9
        world.crash("a", UNKNOWN)
        world.return_s = 0.1
        load(world, "a")  # on the other device
        assert {lease.device for lease in world.scheduler.state.ledger.leases()} == {GPU, GPU1}
        world.post(Configured((model("b", 10000),), tuple(DeviceSpec(d, 16384, 512) for d in world.totals)))
        world.run(3)
        ticket = world.request("b")
        world.run(3)
        assert ticket in world.dispatched

    def test_a_model_that_comes_back_does_not_repeat_its_generations(self, world):
        world.configure(model("a", 4000))
        load(world, "a")
        world.configure()
        world.run(3)
        world.configure(model("a", 4000))
        load(world, "a")
        world.post(WorkerExited(A, ONE, UNKNOWN))
        assert world.loaded() == {"a"}

    def test_an_operator_can_not_ask_for_a_removed_model(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.configure()
        world.post(LoadAsked(A))
        assert world.state("a") == "draining"
        world.finish(ticket)
        world.run(2)
        assert world.alive == {}


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
        world.post(UnloadAsked(A))
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
        for _ in range(600):
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
        world.post(LoadAsked(B))
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
        world.post(LoadAsked(A))
        world.post(Respecified(model("a", 4000)))
        world.post(LoadAsked(A))
        assert world.state("a") == "ready"
        world.finish(ticket)
        world.post(UnloadAsked(A))
        world.run(5)
        assert world.state("a") == "stopped"

    def test_a_model_unloaded_by_hand_stays_unloaded_when_its_configuration_changes(self, world):
        world.configure(model("a", 4000))
        load(world, "a")
        world.exit_s = 2.0
        world.post(UnloadAsked(A))
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
