"""A mistake in handling an event, at any line of the core: the state is whole, one model has failed, the others are served."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from supervisor import core
from supervisor.core import operators, recovery
from supervisor.core.effects import Effect, Reject, StopWorker
from supervisor.core.events import (
    ClientsRead,
    Event,
    HandoverEnded,
    HandoverRequested,
    LeaseEnded,
    LeaseLost,
    LeaseRenewed,
    LeaseRestored,
    LeasesSeen,
    LoadCancelled,
    LoadRequested,
    Mishandled,
    PinRequested,
    RequestArrived,
    RequestFinished,
    Respecified,
    ShutdownRequested,
    Tick,
    UnloadRequested,
    WorkerAdopted,
    WorkerExited,
    WorkerReady,
    WorkerUnready,
)
from supervisor.core.memory.ledger import Ledger
from supervisor.core.recovery import Recovery, copied
from supervisor.core.scheduler import Scheduler
from supervisor.core.state import MishandledError
from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    Generation,
    Limits,
    ModelId,
    Partner,
    RejectCode,
    TicketId,
)
from supervisor.core.workers import reports
from supervisor.engine.recording import packed
from tests.support.counts import examples, times
from tests.support.simulation import GPU, World, load, model, record
from tests.unit.core.test_scheduler_stateful import Scheduling

CORE = str(Path(core.__file__).parent)


class InjectedError(Exception):
    """What nobody expects."""


@contextmanager
def tracing(at_line: Callable[[], None]) -> Iterator[None]:
    """Call it before each line of the core."""

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        if kind == "line":
            at_line()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(scheduler: Scheduler, event: Event, now: float) -> int:
    """How many lines of the core handle it. Changes nothing."""
    other, count = Scheduler(), 0
    other.state = copied(scheduler.state)

    def line() -> None:
        nonlocal count
        count += 1

    with tracing(line):
        other.handle(event, now)
    return count


def raises_at(scheduler: Scheduler, event: Event, now: float, number: int) -> Exception | list[Effect]:
    """Handle it, and raise before that line. Returns what is raised; or the effects, where it has fewer lines."""
    left = number

    def line() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InjectedError

    try:
        with tracing(line):
            return scheduler.handle(event, now)
    except (MishandledError, InjectedError) as mistake:
        return mistake


@dataclass
class ClumsyWorld(World):
    """The scheduler makes a mistake when it is told to: at that part of the way through the event after `skip` others."""

    at: float | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recovery = Recovery(self.scheduler)
        self.handled_kinds = set[type]()
        self.mistakes: list[Event] = []

    def handled(self, event: Event) -> tuple[Event, list[Effect]]:
        self.handled_kinds.add(type(event))
        number = sys.maxsize
        if self.at is not None and not self.skip:
            number, self.at = int(self.at * lines_of(self.scheduler, event, self.now)), None
        self.skip = max(0, self.skip - 1)
        result = (
            self.scheduler.handle(event, self.now)
            if number == sys.maxsize
            else raises_at(self.scheduler, event, self.now, number)
        )
        if isinstance(result, list):
            self.recovery.note(event, self.now)
            return event, result
        recovered = self.recovery.recover(event, self.now, result)
        assert recovered is not None
        for name in failed(recovered[0]):
            known = self.scheduler.state.models.get(name)
            assert known is None or known.removed or known.has_failed
        happened, effects = recovered
        self.mistakes.append(happened)
        return happened, [effect for effect in effects if not is_late(effect, event)]


def is_late(effect: Effect, event: Event) -> bool:
    """Is it for what the event says has ended? The fleet knows that worker no more, and the engine no such ticket."""
    match effect, event:
        case Reject(ticket), RequestFinished():
            return ticket == event.ticket
        case StopWorker(model, generation), WorkerExited():
            return (model, generation) == (event.model, event.generation)
    return False


def failed(event: Event) -> tuple[ModelId, ...]:
    return event.models if isinstance(event, Mishandled) else ()


class Stumbling(Scheduling):
    machine = ClumsyWorld

    @rule(percent=st.integers(0, 99), skip=st.integers(0, 2))
    def stumble(self, percent: int, skip: int) -> None:
        self.world.at, self.world.skip = percent / 100, skip

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.at = None
        super().teardown()


TestStumbling = Stumbling.TestCase
TestStumbling.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)


A, IDLE, AWAY, JOB = map(ModelId, ("a", "idle", "away", "job"))
OTHER = DeviceId("gpu1")
CRASH = Crash(CrashClass.UNKNOWN, "it ended")
PARTNER = Partner("me", 60.0)


def busy() -> ClumsyWorld:
    """One model drains for another, one starts, one has replicas, one is idle, one away; and a partner has a lease."""
    world = ClumsyWorld(totals={GPU: 16384, OTHER: 16384})
    specs = [
        model("a", 9000, target_inflight=2, devices=(GPU,)),
        model("b", 9000, devices=(GPU,)),
        model("twins", 3000, replicas=2, replica_max=2, devices=(OTHER,)),
        model("slow", 4000, devices=(OTHER,)),
        model("idle", 1000, devices=(OTHER,), keep_alive_s=5.0),
        model("away", 1000, devices=(OTHER,)),
    ]
    world.configure(*specs, limits=Limits(loads_per_device=4, min_residency_s=0.0))
    world.lease("job", 1000, devices=(GPU,), ttl_s=60.0)
    for name in ("a", "a", "a", "twins", "idle"):
        world.request(name)
    world.run(3.0)
    world.finish(next(ticket for ticket, key in world.dispatched.items() if key[0] == IDLE))
    world.request("b")
    world.request("slow")
    world.run(0.5)
    states = {"a": "draining", "b": "stopped", "twins": "ready", "slow": "starting", "idle": "ready", "away": "stopped"}
    assert {name: world.state(name) for name in states} == states
    return world


def later(world: World) -> None:
    world.now += 30.0
    world.post(Tick())


def adopt(world: World) -> None:
    key = (AWAY, Generation(7))
    world.alive[key], world.leased[key], world.using[key] = (OTHER,), {OTHER: 1000}, {OTHER: 1000}
    world.post(WorkerAdopted(record(world, "away").spec, key[1], (OTHER,), 1000))


EVENTS: dict[str, Callable[[World], object]] = {
    "configured": lambda w: w.configure(model("a", 8000, definition="new"), model("idle", 1000), model("away", 900)),
    "arrived, and queued": lambda w: w.request("a"),
    "arrived, and dispatched": lambda w: w.request("idle"),
    "arrived, and loads": lambda w: w.request("away"),
    "finished": lambda w: w.finish(min(w.dispatched)),
    "finished in the queue": lambda w: w.finish(min(set(w.open) - set(w.dispatched))),
    "load asked": lambda w: w.post(LoadRequested(AWAY)),
    "unload asked": lambda w: w.post(UnloadRequested(IDLE)),
    "load cancelled": lambda w: w.post(LoadCancelled(ModelId("slow"))),
    "pin asked": lambda w: w.post(PinRequested(IDLE, pin=True)),
    "respecified": lambda w: w.post(Respecified(model("idle", 1500, definition="other"))),
    "ready": lambda w: w.post(WorkerReady(*record(w, "slow").holder)),
    "unready": lambda w: w.post(WorkerUnready(*record(w, "idle").holder, "silent")),
    "clients read": lambda w: w.post(ClientsRead(*record(w, "a").holder, dict.fromkeys(w.dispatched, 0))),
    "crashed": lambda w: w.crash("a", CRASH),
    "not to be killed": lambda w: w.not_to_be_killed(record(w, "idle").holder),
    "sampled": lambda w: w.sample(),
    "tick": later,
    "shutdown": lambda w: w.post(ShutdownRequested()),
    "successor": lambda w: w.post(HandoverRequested()),
    "no successor": lambda w: w.post(HandoverEnded()),
    "adopted": adopt,
    "lease asked": lambda w: w.lease("job 2", 500, devices=(OTHER,)),
    "lease renewed": lambda w: w.post(LeaseRenewed(JOB)),
    "lease ended": lambda w: w.post(LeaseEnded(JOB, "done")),
    "leases of others": lambda w: w.post(LeasesSeen({GPU: 100})),
    "lease lost": lambda w: w.post(LeaseLost(*record(w, "idle").holder, "gone")),
    "lease restored": lambda w: w.post(LeaseRestored(model("job 3", 500), PARTNER, (OTHER,), 500)),
}
PARTS = times(3, 24)


class TestEveryHandler:
    """Wherever in an event it raises, the state is whole, a model has failed or nothing has happened, and the others are served."""

    def test_all_events_are_there(self):
        kinds = set()
        for cause in EVENTS.values():
            world = busy()
            cause(world)
            kinds |= world.handled_kinds
        assert kinds | {Mishandled} == set(get_args(Event))

    @pytest.mark.parametrize("name", EVENTS)
    def test_at_any_line(self, name):
        for part in range(PARTS):
            world = busy()
            world.at = (part + 0.5) / PARTS
            EVENTS[name](world)  # after each event the world checks all laws
            assert world.at is None
            world.run(1.0)
            served = [each for each in ("away", "idle") if not record(world, each).has_failed]
            assert served, "one of them at the most was in question"
            if name == "shutdown":
                world.run(60.0)
                assert not world.alive
                continue
            if name == "successor":
                world.post(HandoverEnded())
            ticket = world.request(served[0])
            world.run(10.0)
            assert ticket in world.dispatched or name == "not to be killed"


class TestAModelOverWhichItIsMade:
    """It has failed: its requests are answered, its worker ends after those that run, and a load begins anew."""

    @pytest.fixture
    def world(self):
        world = ClumsyWorld()
        world.configure(model("a", 4000, target_inflight=1), model("b", 4000))
        return world

    @staticmethod
    def stumble(world: ClumsyWorld, event: Event) -> None:
        world.at = 0.2
        world.post(event)
        assert world.mistakes == [Mishandled(event, (ModelId("a"),), "InjectedError")]

    def test_that_runs(self, world):
        running = world.request("a")
        world.run(3.0)
        waiting = world.request("a")
        self.stumble(world, WorkerUnready(*record(world, "a").holder, "silent"))
        assert world.state("a") == "draining"
        assert world.rejected[waiting].code is RejectCode.MODEL_FAILED
        late = world.request("a")
        assert world.rejected[late].code is RejectCode.MODEL_FAILED
        assert "llmux made a mistake over it (InjectedError)" in world.rejected[late].message
        world.finish(running)
        world.run(1.0)
        assert (world.state("a"), world.alive) == ("failed", {})
        assert world.rejected[world.request("a")].retry_after_s == pytest.approx(600, abs=2)

    def test_a_load_begins_anew(self, world):
        world.request("a")
        world.run(3.0)
        self.stumble(world, WorkerUnready(*record(world, "a").holder, "silent"))
        world.post(LoadRequested(ModelId("a")))
        assert (world.state("a"), record(world, "a").mistake) == ("ready", None)

    def test_it_is_tried_again_by_itself(self, world):
        self.stumble(world, LoadRequested(ModelId("a")))
        assert world.state("a") == "failed"
        world.run(590.0)
        assert world.state("a") == "failed"
        world.run(20.0)
        assert world.state("a") == "ready"


class TestAMistakeEachTime:
    """Where it is made again and again, what can't be handled is left out, and everything else goes on."""

    @pytest.fixture
    def world(self):
        world = ClumsyWorld()
        world.configure(model("cursed", 4000), model("a", 4000))
        return world

    @staticmethod
    def recovered(world: ClumsyWorld, event: Event) -> tuple[Event, list[Effect]] | None:
        with pytest.raises(MishandledError) as caught:
            world.scheduler.handle(event, world.now)
        return world.recovery.recover(event, world.now, caught.value)

    def test_over_one_model(self, world, monkeypatch):
        begin = Ledger.begin

        def stumble(self, holder, *more, **named):
            assert holder[0] != "cursed"
            begin(self, holder, *more, **named)

        monkeypatch.setattr(Ledger, "begin", stumble)
        event, effects = self.recovered(world, RequestArrived(TicketId("1"), ModelId("cursed")))
        assert event == Mishandled(
            RequestArrived(TicketId("1"), ModelId("cursed")), (ModelId("cursed"),), "AssertionError"
        )
        assert [effect.code for effect in effects if isinstance(effect, Reject)] == [RejectCode.MODEL_FAILED]
        world.scheduler.state.check()
        assert world.state("cursed") == "failed"
        load(world, "a")

    def test_over_all_of_an_event(self, world, monkeypatch):
        before, reading = packed(world.scheduler), world.reading()
        sampled = reports.sampled
        monkeypatch.setattr(reports, "sampled", lambda *args: 1 / 0 if args[2] is reading else sampled(*args))
        assert self.recovered(world, reading) is None
        assert packed(world.scheduler) == before, "nothing has happened"
        load(world, "a")

    def test_no_more_models_than_are_concerned_fail(self, world, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(operators, "load", lambda *_: 1 / 0)
            event, _ = self.recovered(world, LoadRequested(ModelId("a")))
        assert event == Mishandled(None, (ModelId("a"),), "ZeroDivisionError")
        assert (world.state("a"), world.state("cursed")) == ("failed", "stopped")


class TestCopies:
    """A copy of the state is equal to it, and nothing that happens to one is seen in the other."""

    def test_independent(self):
        world = busy()
        before, kept = packed(world.scheduler.state), copied(world.scheduler.state)
        assert packed(kept) == before
        world.run(40.0)
        for ticket in list(world.dispatched):
            world.finish(ticket)
        assert packed(world.scheduler.state) != before
        assert packed(kept) == before

    def test_each_is_of_its_moment(self, monkeypatch):
        """Also where it shares with the one before what had not changed."""
        kept, shared = [], 0
        keep = Recovery._save_state

        def noted(self: Recovery) -> None:
            nonlocal shared
            before = self._saved_state.models
            keep(self)
            kept.append((packed(self._scheduler.state), self._saved_state))
            shared += sum(model is before.get(model.id) for model in self._saved_state.models.values())

        monkeypatch.setattr(recovery, "MOST_EVENTS", 1)
        monkeypatch.setattr(recovery, "EVENTS_PER_MODEL", 0)
        monkeypatch.setattr(Recovery, "_save_state", noted)
        world = busy()
        world.run(40.0)
        for ticket in list(world.dispatched):
            world.finish(ticket)
        world.run(4000.0)
        assert len(kept) > 20
        assert shared > 20
        for state, copy in kept:
            assert packed(copy) == state

    def test_events_since_the_last_copy_are_handled_again(self, monkeypatch):
        monkeypatch.setattr(recovery, "MOST_EVENTS", 7)
        monkeypatch.setattr(recovery, "EVENTS_PER_MODEL", 0)
        world = busy()
        before = packed(world.scheduler.state)
        world.at = 0.0
        world.post(HandoverEnded())
        world.scheduler.state.wanted.check()
        assert packed(world.scheduler.state) == before
