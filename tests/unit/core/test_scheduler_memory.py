"""Memory as the scheduler judges it: at the exit, while two want it, when it is learned, and of workers that are no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.effects import Learn
from supervisor.core.events import (
    Configured,
    DeviceSample,
    LoadRequested,
    MemorySampled,
    UnloadRequested,
    WorkerExited,
    WorkerSample,
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
    RejectCode,
)
from tests.support.simulation import GPU, World, guessed, load, model, record

A, B, ONE = ModelId("a"), ModelId("b"), Generation(1)
GPU1 = DeviceId("gpu1")
UNKNOWN = Crash(CrashClass.UNKNOWN, "exited with 3", ("last line",), 3)


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
        world.post(UnloadRequested(A))
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
        world.post(LoadRequested(A))
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
        world.post(LoadRequested(A))
        world.finish(waiting)
        assert world.state("a") == "ready"
        world.finish(running)
        world.post(UnloadRequested(B))
        load(world, "b")
        assert world.loaded() == {"b"}
        world.post(UnloadRequested(B))
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


OUT_OF_MEMORY = Crash(CrashClass.OUT_OF_MEMORY, "it ran out of memory")


class TestRunningOutOfMemory:
    """A load that ran out of memory raises the footprint and is tried once more; then it has failed."""

    @pytest.fixture
    def short(self, world):
        """How much `a` really needs to load; what it got at each start."""
        leases = []

        def crash(name):
            leases.append(world.scheduler.state.ledger.leases_of(record(world, name).holder)[0].mib)
            return OUT_OF_MEMORY if name == "a" and leases[-1] < world.needs else None

        world.needs, world.leases = 4500, leases
        world.crash_on_start = crash
        return world

    def load(self, world):
        ticket = world.request("a")
        world.run(6)
        assert ticket in world.dispatched
        world.finish(ticket)
        world.run(1)

    def learned(self, world):
        return [(effect.device, effect.mib) for effect in world.effects if isinstance(effect, Learn) and effect.raised]

    @pytest.mark.parametrize("spec", [model("a", 4000), guessed("a", 4000)], ids=["configured", "guessed"])
    def test_the_retry_has_more_room(self, short, spec):
        short.configure(spec)
        ticket = short.request("a")
        short.run(6)
        assert short.leases == [4000, 5000]
        assert ticket in short.dispatched

    def test_what_it_got_is_remembered_and_told(self, short):
        short.blind = True
        short.configure(guessed("a", 4000))
        self.load(short)
        assert self.learned(short) == [(GPU, 5000)]
        (raised,) = [reason for kind, reason in short.reasons("a") if kind == "raise"]
        assert raised == "ran out of memory while loading; tried once more, with 5000 MiB on gpu0 instead of 4000"
        short.post(UnloadRequested(A))
        short.run(1)
        self.load(short)
        assert short.leases == [4000, 5000, 5000]
        spec = record(short, "a").spec
        assert DeviceSpec(GPU, 16384, 512).need(spec) == Footprint(
            5000, FootprintSource.RAISED, "a load with less ran out of memory on gpu0"
        )

    @pytest.mark.parametrize(("measured_mib", "lease_mib"), [(3000, 5000), (6000, 6000)])
    def test_the_larger_of_raised_and_measured_counts(self, short, measured_mib, lease_mib):
        learned = {GPU: Footprint(measured_mib, FootprintSource.LEARNED)}
        short.configure(guessed("a", 4000, learned=learned, raised={GPU: 5000}))
        self.load(short)
        assert short.leases == [lease_mib]

    def test_room_is_made_for_the_retry(self, short):
        short.configure(model("a", 4000), model("b", 11500), limits=Limits(min_residency_s=0.0))
        load(short, "b")
        ticket = short.request("a")
        short.run(8)
        assert ticket in short.dispatched
        assert short.loaded() == {"a"}

    def test_a_second_time_is_a_failure_with_its_cause(self, short):
        short.needs = 9000
        short.configure(model("a", 4000))
        ticket = short.request("a")
        short.run(10)
        assert short.leases == [4000, 5000]
        assert short.state("a") == "failed"
        assert record(short, "a").life.reason == (
            "failed again with more memory: it ran out of memory; next try in 10 min"
        )
        refused = short.rejected[ticket]
        assert (refused.code, refused.retry_after_s) == (RejectCode.MODEL_FAILED, pytest.approx(600.0))
        assert "it ran out of memory" in refused.message

    def test_a_later_try_has_the_raised_footprint_and_raises_it_no_further(self, short):
        short.needs = 9000
        short.configure(model("a", 4000))
        short.request("a")
        short.run(10)
        short.post(LoadRequested(A))
        short.run(10)
        assert short.leases == [4000, 5000, 5000]
        assert short.state("a") == "failed"

    def test_after_a_success_it_may_be_raised_again(self, short):
        short.configure(model("a", 4000))
        self.load(short)
        short.post(UnloadRequested(A))
        short.run(1)
        short.needs = 6000
        self.load(short)
        assert short.leases == [4000, 5000, 5000, 6250]

    def test_there_is_never_more_than_the_device_has(self, short):
        short.needs = 15000
        short.configure(model("a", 14000))
        ticket = short.request("a")
        short.run(10)
        assert short.leases == [14000, 15872]
        assert ticket in short.dispatched

    def test_one_that_has_everything_is_tried_once_more_all_the_same(self, short):
        short.needs = 99999
        short.configure(model("a", 15872))
        short.request("a")
        short.run(10)
        assert short.leases == [15872, 15872]
        assert self.learned(short) == []
        assert short.state("a") == "failed"

    def test_an_earlier_daemon_has_raised_it(self, short):
        short.configure(guessed("a", 4000, raised={GPU: 5000}))
        self.load(short)
        assert short.leases == [5000]

    def test_other_settings_are_another_footprint(self, short):
        short.needs = 9000
        short.configure(model("a", 4000))
        short.request("a")
        short.run(10)
        changed = replace(model("a", 4000, definition="smaller context"), footprint_key="smaller")
        short.needs = 4200
        short.configure(changed)
        self.load(short)
        assert short.leases == [4000, 5000, 4000, 5000]


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
        world.post(LoadRequested(A))
        assert world.state("a") == "draining"
        world.finish(ticket)
        world.run(2)
        assert world.alive == {}
