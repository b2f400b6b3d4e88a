"""The scheduler, one scenario a test, on a simulated machine that checks the conservation laws after every event."""

from __future__ import annotations

import pytest

from supervisor.core.demand import HIGH
from supervisor.core.effects import Alert, Learn, StopWorker
from supervisor.core.events import (
    Configured,
    DeviceSample,
    LoadRequested,
    MemorySampled,
    ShutdownRequested,
    UnloadRequested,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.core.types import (
    MODEL_PLACEHOLDER,
    Crash,
    CrashClass,
    DeviceId,
    DeviceSpec,
    Eviction,
    Generation,
    Limits,
    ModelId,
    Policy,
    RejectCode,
)
from tests.support.simulation import GPU, World, load, model, record


class TestColdModel:
    """A request for a model that isn't loaded is held, the model is loaded once, and everybody is served."""

    def test_is_loaded_and_answers(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        assert world.state("a") == "starting"
        world.run(3)
        assert world.dispatched == {ticket: ("a", 1)}

    def test_500_at_once_are_one_start(self, world):
        world.configure(model("a", 4000), limits=Limits(queue_per_model=512))
        tickets = [world.request("a") for _ in range(500)]
        world.run(3)
        assert world.starts == ["a"]
        assert world.dispatched.keys() == set(tickets)

    def test_over_the_limit_is_refused_at_once_with_a_time_to_retry(self, world):
        world.configure(model("a", 4000))
        tickets = [world.request("a") for _ in range(66)]
        assert world.rejected.keys() == set(tickets[64:])
        reject = world.rejected[tickets[64]]
        assert reject.code is RejectCode.QUEUE_FULL
        assert reject.retry_after_s >= 1

    def test_first_request_reaches_it_before_anything_can_evict_it(self, world):
        world.configure(model("a", 10000), model("b", 10000, priority=500))
        first = world.request("a")
        world.run(1)
        second = world.request("b")  # of higher priority, and it needs a's memory
        world.run(1.5)
        assert world.dispatched == {first: ("a", 1)}
        world.finish(first)
        world.run(3)
        assert world.dispatched == {second: ("b", 1)}

    def test_gets_no_more_than_its_target_in_flight(self, world):
        world.configure(model("a", 4000, target_inflight=2))
        tickets = [world.request("a") for _ in range(3)]
        world.run(3)
        assert list(world.dispatched) == tickets[:2]
        world.finish(tickets[0])
        assert list(world.dispatched) == tickets[1:]

    def test_requests_that_share_a_context_wait_until_they_fit(self, world):
        world.configure(model("a", 4000, target_inflight=4, shared_context=100))
        long, second, longest, last = [world.request("a", tokens=tokens) for tokens in (70, 30, 900, 1)]
        world.run(3)
        assert list(world.dispatched) == [long, second], "the others would not fit beside them"
        world.finish(second)
        assert list(world.dispatched) == [long], "in order: the long one would wait for ever else"
        world.finish(long)
        assert list(world.dispatched) == [longest], "alone, however long it is"
        world.finish(longest)
        assert list(world.dispatched) == [last]

    def test_who_is_next_when_one_that_does_not_fit_leaves(self, world):
        world.configure(model("a", 4000, target_inflight=4, shared_context=100))
        first, large, small = [world.request("a", tokens=tokens) for tokens in (70, 60, 30)]
        world.run(3)
        world.finish(large)
        assert list(world.dispatched) == [first, small]

    def test_one_of_a_higher_class_that_fits_overtakes_one_that_does_not(self, world):
        world.configure(model("a", 4000, target_inflight=4, shared_context=100))
        first = world.request("a", tokens=70)
        world.run(3)
        world.request("a", tokens=60)
        urgent = world.request("a", HIGH, tokens=30)
        assert list(world.dispatched) == [first, urgent]

    def test_unknown_model(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("b")
        assert world.rejected[ticket].code is RejectCode.MODEL_NOT_FOUND


class TestMemory:
    """A load starts only on memory that was measured to be free."""

    def test_two_that_do_not_fit_take_turns(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        for turn, name in enumerate(["a", "b", "a", "b"]):
            ticket = world.request(name)
            world.run(5)
            assert ticket in world.dispatched, f"turn {turn}"
            assert world.loaded() == {name}
            world.finish(ticket)
        assert world.starts == ["a", "b", "a", "b"]
        assert any("evicting b" in reason for kind, reason in world.reasons("a") if kind == "evict")

    def test_two_that_fit_stay_side_by_side(self, world):
        world.configure(model("a", 7000), model("b", 7000))
        for name in "ab":
            world.finish(world.request(name))
            ticket = world.request(name)
            world.run(5)
            world.finish(ticket)
        assert world.loaded() == {"a", "b"}

    @pytest.mark.parametrize("late", [0.0, 1.5, 6.0])
    def test_memory_that_comes_back_late_is_waited_for(self, world, late):
        world.return_s = late
        world.configure(model("a", 10000), model("b", 10000))
        world.finish(world.request("a"))
        first = world.request("a")
        world.run(3)
        world.finish(first)
        world.run(1)
        second = world.request("b")
        world.run(late + 4)
        assert second in world.dispatched
        alerts = [effect.code for effect in world.effects if isinstance(effect, Alert)]
        assert alerts == (["memory.late"] if late > 5 else [])

    def test_memory_that_never_comes_back_quarantines_its_device_only(self):
        other = DeviceId("gpu1")
        world = World(totals={GPU: 16384, other: 16384})
        world.return_s = 1e9
        world.configure(
            model("a", 10000, devices=(GPU,)), model("b", 10000, devices=(GPU,)), model("c", 10000, devices=(other,))
        )
        ticket = world.request("a")
        world.run(3)
        world.finish(ticket)
        world.run(1)
        stuck = world.request("b")
        world.run(40)
        assert stuck not in world.dispatched
        assert "device.quarantined" in [effect.code for effect in world.effects if isinstance(effect, Alert)]
        served = world.request("c")
        world.run(3)
        assert served in world.dispatched

    def test_a_reading_that_is_stale_holds_loads_back(self, world):
        world.configure(model("a", 4000))
        world.post(MemorySampled((DeviceSample(GPU, 16384, stale=True),), (), world.now))
        ticket = world.request("a")
        assert world.starts == []
        assert world.reasons("a")[-1][0] == "wait"
        world.run(3)  # readings are fresh again
        assert ticket in world.dispatched

    def test_outside_use_counts(self, world):
        world.outside = {GPU: 8000}
        world.configure(model("a", 10000))
        ticket = world.request("a")
        reject = world.rejected[ticket]
        assert reject.code is RejectCode.INSUFFICIENT_MEMORY
        assert "outside" in reject.message
        assert reject.retry_after_s, "another program may give it back"

    def test_one_load_at_a_time_on_a_device(self, world):
        world.configure(model("a", 4000), model("b", 4000))
        world.request("a")
        world.request("b")
        assert world.starts == ["a"]
        world.run(2.5)
        assert world.starts == ["a", "b"]

    def test_what_it_took_is_learned_and_used_next_time(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(2.1)
        world.using[(ModelId("a"), Generation(1))] = {GPU: 5000}
        world.run(1)
        assert Learn(ModelId("a"), GPU, "a", 5000) in world.effects
        world.finish(ticket)

    def test_a_later_small_want_does_not_take_what_an_earlier_one_waits_for(self, world):
        world.configure(model("a", 9000), model("big", 15000, priority=100), model("small", 6000))
        busy = world.request("a")
        world.run(35)  # past a's minimum residency
        big = world.request("big")
        small = world.request("small")  # would fit beside a, but then big would wait for it as well
        world.run(3)
        assert world.dispatched.keys() == {busy}
        world.finish(busy)
        world.run(4)
        assert big in world.dispatched
        world.finish(big)
        world.run(5)
        assert small in world.dispatched

    def test_what_is_freed_beyond_an_earlier_promise_is_waited_for(self, world):
        world.configure(model("big", 13312), model("small", 4096), model("mid", 9216))
        ticket = world.request("big")
        world.run(3)
        world.finish(ticket)
        world.run(1)
        small, mid = world.request("small"), world.request("mid")
        assert not world.rejected
        world.run(6)
        assert world.dispatched.keys() == {small, mid}


class TestEviction:
    """Who is claimed, drained, resumed."""

    def test_a_busy_victim_drains_and_its_new_requests_wait(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = world.request("a")
        world.run(35)
        waiting = world.request("b")
        assert world.state("a") == "draining"
        late = world.request("a")
        assert late not in world.dispatched
        world.finish(running)
        world.run(4)
        assert waiting in world.dispatched
        assert late not in world.dispatched
        world.finish(waiting)
        world.run(35)
        assert late in world.dispatched

    def test_a_victim_is_resumed_when_its_waiter_leaves(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = world.request("a")
        world.run(35)
        waiting = world.request("b")
        late = world.request("a")
        world.finish(waiting)
        assert world.state("a") == "ready"
        assert world.dispatched.keys() == {running, late}

    def test_a_young_model_in_demand_keeps_its_place_for_the_minimum_residency(self, world):
        world.configure(model("a", 10000, target_inflight=1), model("b", 10000))
        mine = [world.request("a") for _ in range(60)]
        world.run(2.1)
        other = world.request("b")
        served_at = None
        for ticket in mine:  # one request a second
            world.run(1)
            world.finish(ticket)
            if other in world.dispatched and served_at is None:
                served_at = world.now
        assert served_at is not None, "nobody waits for ever"
        assert 30 <= served_at - 1002 <= 36
        assert world.starts[:2] == ["a", "b"]

    def test_an_idle_young_model_goes_at_once(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        ticket = world.request("a")
        world.run(2.1)
        world.finish(ticket)
        world.request("b")
        world.run(0.3)
        assert world.state("a") in {"stopping", "stopped"}

    def test_pinned_is_never_evicted(self, world):
        world.configure(model("a", 10000, pin=True), model("b", 10000, priority=900))
        world.finish(world.request("a"))
        ticket = world.request("a")
        world.run(3)
        world.finish(ticket)
        world.run(1)
        refused = world.request("b")
        assert world.rejected[refused].code is RejectCode.INSUFFICIENT_MEMORY
        assert "pinned a" in world.rejected[refused].message

    def test_max_loaded(self, world):
        world.configure(model("a", 1000), model("b", 1000), policy=Policy(max_loaded={"llm": 1}))
        for name in "ab":
            ticket = world.request(name)
            world.run(3)
            world.finish(ticket)
            world.run(1)
        assert world.loaded() == {"b"}

    def test_strict_never_evicts_a_higher_priority(self, world):
        policy = Policy(eviction=Eviction.STRICT)
        world.configure(model("asr", 10000, "asr"), model("llm", 10000), policy=policy)
        ticket = world.request("asr")
        world.run(3)
        world.finish(ticket)
        world.run(1)
        refused = world.request("llm")
        assert "strict" in world.rejected[refused].message

    def test_a_load_nobody_waits_for_any_more_is_cancelled(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(0.5)
        world.finish(ticket)
        assert world.state("a") == "stopping"
        world.run(1)
        assert world.state("a") == "stopped"


class TestCrash:
    """Crashes are classified, retried with backoff, and given up with the class in every answer."""

    unknown = Crash(CrashClass.UNKNOWN, "exited with 3", ("last line",), 3, "exited with 3: last line")
    refused = Crash(CrashClass.HOST, "no processes left")

    def test_five_in_ten_minutes_are_a_failure(self, world):
        world.crash_on_start = lambda _model: self.unknown
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(60)
        assert world.starts == ["a"] * 5
        assert world.rejected[ticket].code is RejectCode.MODEL_FAILED
        at_once = world.request("a")
        assert "exited with 3. " in world.rejected[at_once].message
        assert f"llmux load {MODEL_PLACEHOLDER}" in world.rejected[at_once].message
        assert "last line" not in str(world.rejected), "a log is for operators"
        assert "last line" in record(world, "a").life.reason

    def test_a_failed_model_is_tried_again_once_each_pause(self, world):
        world.crash_on_start = lambda _model: self.unknown
        world.configure(model("a", 4000))
        world.request("a")
        world.run(60)
        told = world.rejected[world.request("a")]
        assert "tried again in 9 min" in told.message
        assert 500 < told.retry_after_s < 600
        world.run(1200)
        assert world.starts == ["a"] * 7, "one start each ten minutes, though nobody asked"
        assert world.state("a") == "failed"
        assert [kind for kind, _ in world.reasons("a")].count("retry") == 2
        world.crash_on_start = lambda _model: None
        world.run(600)
        assert world.state("a") == "ready"
        world.crash("a", self.unknown)
        assert world.state("a") == "backoff", "what served has another five"

    def test_a_failed_model_that_nobody_asked_for_evicts_nobody(self, world):
        world.crash_on_start = lambda name: self.unknown if name == "a" else None
        world.configure(model("a", 10000), model("b", 10000))
        world.request("a")
        world.run(60)
        assert world.state("a") == "failed"
        load(world, "b")
        world.run(700)
        assert world.loaded() == {"b"}
        assert world.starts.count("a") == 5

    def test_a_request_after_the_pause_starts_it(self, world):
        world.crash_on_start = lambda name: self.unknown if name == "a" else None
        world.configure(model("a", 10000), model("b", 10000))
        world.request("a")
        world.run(60)
        load(world, "b")
        world.run(700)
        world.crash_on_start = lambda _model: None
        ticket = world.request("a")
        world.run(5)
        assert ticket in world.dispatched

    def test_an_unload_ends_the_tries(self, world):
        world.crash_on_start = lambda _model: self.unknown
        world.configure(model("a", 4000))
        world.request("a")
        world.run(60)
        world.post(UnloadRequested(ModelId("a")))
        world.run(2000)
        assert world.starts == ["a"] * 5

    def test_what_the_host_refuses_is_not_counted(self, world):
        world.load_s = 0.1
        world.crash_on_start = lambda _model: self.refused
        world.configure(model("a", 4000), limits=Limits(backoff_max_s=4.0))
        ticket = world.request("a")
        world.run(60)
        assert 12 < len(world.starts) < 30, "the pause grows to its limit"
        assert world.state("a") in {"backoff", "starting"}
        assert ticket in world.open
        world.crash_on_start = lambda _model: None
        world.run(6)
        assert ticket in world.dispatched
        assert record(world, "a").crashes.refusals == 0

    def test_a_failed_model_is_reset_by_load(self, world):
        world.crash_on_start = lambda _model: self.unknown
        world.configure(model("a", 4000))
        world.request("a")
        world.run(60)
        world.crash_on_start = lambda _model: None
        world.post(LoadRequested(ModelId("a")))
        world.run(3)
        assert world.state("a") == "ready"

    def test_bad_arguments_are_not_tried_again(self, world):
        world.crash_on_start = lambda _model: Crash(CrashClass.BAD_ARGUMENTS, "unknown argument --x")
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(2000)
        assert world.starts == ["a"]
        assert "unknown argument --x" in world.rejected[ticket].message
        assert world.rejected[ticket].retry_after_s is None
        assert world.rejected[world.request("a")].retry_after_s is None
        assert record(world, "a").crashes.retry_at is None

    def test_a_missing_runtime_is_refused_with_its_remedy_and_tried_again_next_time(self, world):
        world.crash_on_start = lambda _model: Crash(CrashClass.NOT_INSTALLED, "Remedy: llmux runtimes install x")
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        assert world.rejected[ticket].code is RejectCode.RUNTIME_NOT_INSTALLED
        world.crash_on_start = lambda _model: None
        ticket = world.request("a")
        world.run(3)
        assert ticket in world.dispatched

    def test_a_loaded_model_comes_back_by_itself_within_two_seconds(self, world):
        world.load_s = 0.2
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(1)
        world.crash("a", Crash(CrashClass.UNKNOWN, "killed", (), -9))
        world.run(2)
        assert world.state("a") == "ready"
        assert ticket not in world.open

    def test_a_crashed_model_nobody_asks_for_evicts_nobody(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        ticket = world.request("a")
        world.run(3)
        world.crash("a", self.unknown)
        world.run(0.2)
        other = world.request("b")
        world.run(4)
        assert other in world.dispatched
        world.run(20)
        assert world.loaded() == {"b"}
        assert ticket not in world.open

    def test_messages_of_an_older_worker_are_dropped(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.crash("a", self.unknown)
        world.run(5)
        assert world.state("a") == "ready"
        world.post(WorkerExited(ModelId("a"), Generation(1), self.unknown))
        world.post(WorkerReady(ModelId("a"), Generation(1)))
        assert world.state("a") == "ready"
        assert ticket not in world.open

    def test_an_unready_worker_gets_nothing_new_until_it_recovers(self, world):
        world.configure(model("a", 4000))
        world.finish(world.request("a"))
        first = world.request("a")
        world.run(3)
        world.finish(first)
        world.post(WorkerUnready(ModelId("a"), Generation(2), "3 probes failed"))
        held = world.request("a")
        assert held not in world.dispatched
        world.post(WorkerReady(ModelId("a"), Generation(2)))
        assert held in world.dispatched

    def test_an_unkillable_worker_quarantines_its_device(self):
        world = World()
        world.configure(model("a", 4000), model("b", 4000))
        ticket = world.request("a")
        world.run(3)
        world.finish(ticket)
        world.exit_s = 100.0
        world.post(UnloadRequested(ModelId("a")))
        world.post(WorkerUnkillable(ModelId("a"), Generation(1), "still there 5 s after SIGKILL"))
        assert world.request("a") in world.rejected
        assert world.request("b") in world.rejected
        world.run(105)  # it is gone at last
        served = world.request("b")
        world.run(5)
        assert served in world.dispatched


class TestOperators:
    """Load, unload, reload, shutdown."""

    def test_unload_waits_for_running_requests_then_cuts_them(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.post(UnloadRequested(ModelId("a")))
        assert world.state("a") == "draining"
        world.run(31)
        assert world.cut == [ticket]
        assert world.state("a") == "stopped"

    def test_unload_with_force_cuts_at_once(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.post(UnloadRequested(ModelId("a"), force=True))
        assert world.cut == [ticket]
        assert any(isinstance(effect, StopWorker) and effect.force for effect in world.effects)

    def test_keep_alive(self, world):
        world.configure(model("a", 4000, keep_alive_s=10.0))
        ticket = world.request("a")
        world.run(30)
        world.finish(ticket)
        world.run(9)
        assert world.state("a") == "ready"
        world.run(2)
        assert world.state("a") == "stopped"

    def test_preload(self, world):
        world.configure(model("a", 4000, preload=True))
        world.run(3)
        assert world.state("a") == "ready"

    def test_a_changed_model_restarts_after_its_streams_end(self, world):
        world.configure(model("a", 4000), model("b", 1000))
        ticket = world.request("a")
        world.run(3)
        world.configure(model("a", 5000, definition="new"), model("b", 1000))
        assert world.state("a") == "draining"
        world.finish(ticket)
        world.run(4)
        assert world.starts == ["a", "a"]
        assert world.scheduler.state.models[ModelId("a")].spec.definition == "new"

    def test_a_removed_model_ends_after_its_streams_and_is_forgotten(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        devices = (DeviceSpec(GPU, 16384, 512),)
        world.post(Configured((), devices))
        refused = world.request("a")
        assert world.rejected[refused].code is RejectCode.MODEL_NOT_FOUND
        world.finish(ticket)
        world.run(2)
        assert world.scheduler.state.models == {}
        assert world.alive == {}

    def test_nobody_waits_past_the_deadline(self, world):
        world.configure(model("a", 10000), model("b", 10000), limits=Limits(queue_wait_s=20.0))
        world.request("a")
        world.run(3)
        ticket = world.request("b")
        world.run(21)
        assert world.rejected[ticket].code is RejectCode.QUEUE_TIMEOUT

    def test_shutdown_drains_and_stops_everything(self, world):
        world.configure(model("a", 4000), model("b", 4000))
        running = world.request("a")
        world.run(3)
        world.post(ShutdownRequested())
        refused = world.request("b")
        assert world.rejected[refused].code is RejectCode.SHUTTING_DOWN
        world.finish(running)
        world.run(2)
        assert world.alive == {}
