"""Remote models in the core: started without a plan, never in anybody's way, refused while they don't answer."""

from __future__ import annotations

import pytest

from supervisor.core.effects import Alert, CutRequest, Dispatch, Reject, StartWorker, StopWorker
from supervisor.core.events import (
    Configured,
    DeviceSample,
    LoadRequested,
    MemorySampled,
    RequestArrived,
    RequestFinished,
    ShutdownRequested,
    Tick,
    UnloadRequested,
    WorkerAdopted,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import (
    REMOTE,
    Crash,
    CrashClass,
    DeviceId,
    DeviceSpec,
    Footprint,
    FootprintSource,
    Generation,
    ModelId,
    ModelSpec,
    Policy,
    RejectCode,
    TicketId,
    WorkerState,
)

FAR, NEAR, HOST = ModelId("far"), ModelId("near"), DeviceId("host")
FIRST = Generation(1)
NOTHING = Footprint(0, FootprintSource.EXPLICIT)


class Clock:
    """A scheduler, and time that a test sets."""

    def __init__(self, *specs: ModelSpec, policy: Policy | None = None) -> None:
        self.scheduler, self.now, self.tickets = Scheduler(), 0.0, 0
        self.devices = (DeviceSpec(HOST, 1000, 0, returns_at_exit=True),)
        self.started = self.do(Configured(specs, self.devices, policy=policy or Policy()))
        self.do(MemorySampled((DeviceSample(HOST, 1000),), (), 0.0))

    def do(self, event, after: float = 0.1) -> list:
        self.now += after
        effects = self.scheduler.handle(event, self.now)
        self.scheduler.state.check()
        return effects

    def ask(self, model: ModelId = FAR) -> tuple[TicketId, list]:
        self.tickets += 1
        ticket = TicketId(str(self.tickets))
        return ticket, self.do(RequestArrived(ticket, model))

    def record(self, model: ModelId = FAR):
        return self.scheduler.state.models[model]


def far(**keys: object) -> ModelSpec:
    return ModelSpec(FAR, "llm", 0, NOTHING, remote=True, definition="1", **keys)


def near(mib: int = 900) -> ModelSpec:
    return ModelSpec(NEAR, "llm", 500, Footprint(mib, FootprintSource.EXPLICIT))


def of_kind(effects: list, kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def ready() -> Clock:
    clock = Clock(far())
    clock.do(WorkerReady(FAR, FIRST))
    return clock


class TestStart:
    """It is connected as soon as it is configured, on no device."""

    def test_at_once_and_without_a_lease(self):
        clock = Clock(far())
        assert of_kind(clock.started, StartWorker) == [StartWorker(FAR, FIRST, REMOTE, (0,))]
        assert clock.scheduler.state.ledger.leases() == ()
        clock.do(WorkerReady(FAR, FIRST))
        assert (clock.record().state, clock.record().devices) == (WorkerState.READY, REMOTE)

    def test_without_any_device(self):
        scheduler = Scheduler()
        (start, *_) = of_kind(scheduler.handle(Configured((far(),), ()), 0.0), StartWorker)
        assert start.devices == REMOTE

    def test_beside_models_that_fill_everything(self):
        clock = Clock(near(), far(), policy=Policy(max_loaded={"llm": 1}))
        _, effects = clock.ask(NEAR)
        assert [start.model for start in of_kind(effects, StartWorker)] == [NEAR]
        assert of_kind(effects, StopWorker) == []
        clock.do(WorkerReady(NEAR, FIRST))
        clock.do(WorkerReady(FAR, FIRST))
        assert clock.record().state is clock.record(NEAR).state is WorkerState.READY

    def test_what_cant_be_used_fails_for_good(self):
        clock = Clock(far())
        effects = clock.do(WorkerExited(FAR, FIRST, Crash(CrashClass.BAD_ARGUMENTS, "no key")))
        assert clock.record().state is WorkerState.FAILED
        assert of_kind(effects, StartWorker) == []
        _, effects = clock.ask()
        assert [reject.code for reject in of_kind(effects, Reject)] == [RejectCode.MODEL_FAILED]

    def test_and_starts_again_with_another_definition(self):
        clock = Clock(far())
        clock.do(WorkerExited(FAR, FIRST, Crash(CrashClass.BAD_ARGUMENTS, "no key")))
        other = ModelSpec(FAR, "llm", 0, NOTHING, remote=True, definition="2")
        effects = clock.do(Configured((other,), clock.devices))
        assert [start.generation for start in of_kind(effects, StartWorker)] == [2]


class TestRequests:
    """Admission is as for any worker."""

    def test_target_inflight(self):
        clock = Clock(far(target_inflight=1))
        clock.do(WorkerReady(FAR, FIRST))
        first, effects = clock.ask()
        assert of_kind(effects, Dispatch) == [Dispatch(first, FAR, FIRST)]
        second, effects = clock.ask()
        assert of_kind(effects, Dispatch) == []
        assert of_kind(clock.do(RequestFinished(first)), Dispatch) == [Dispatch(second, FAR, FIRST)]

    def test_those_that_come_while_it_is_connected_wait(self):
        clock = Clock(far())
        ticket, effects = clock.ask()
        assert effects == []
        assert of_kind(clock.do(WorkerReady(FAR, FIRST)), Dispatch) == [Dispatch(ticket, FAR, FIRST)]


class TestUnready:
    """Nobody waits for what nothing here can bring back."""

    def test_refused_at_once(self, ready):
        ready.do(WorkerUnready(FAR, FIRST, "it is down"))
        _, effects = ready.ask()
        (reject,) = of_kind(effects, Reject)
        assert (reject.code, "it is down" in reject.message) == (RejectCode.REMOTE_UNAVAILABLE, True)

    def test_so_are_those_who_wait(self):
        clock = Clock(far(target_inflight=1))
        clock.do(WorkerReady(FAR, FIRST))
        clock.ask()
        waiting, _ = clock.ask()
        (reject,) = of_kind(clock.do(WorkerUnready(FAR, FIRST, "it is down")), Reject)
        assert reject.ticket == waiting
        assert len(clock.record().in_flight) == 1  # which goes on

    def test_at_the_start(self):
        clock = Clock(far())
        _, _ = clock.ask()
        effects = clock.do(WorkerUnready(FAR, FIRST, "it is down"))
        assert len(of_kind(effects, Reject)) == 1
        assert (clock.record().state, clock.record().answering) == (WorkerState.READY, False)

    def test_until_it_answers(self, ready):
        ready.do(WorkerUnready(FAR, FIRST, "it is down"))
        ready.do(WorkerReady(FAR, FIRST))
        ticket, effects = ready.ask()
        assert of_kind(effects, Dispatch) == [Dispatch(ticket, FAR, FIRST)]
        assert ready.record().life.reason == "answers again"

    def test_late_news_is_dropped(self, ready):
        ready.do(UnloadRequested(FAR))
        ready.do(WorkerExited(FAR, FIRST))
        ready.do(LoadRequested(FAR))
        ready.do(WorkerReady(FAR, Generation(2)))
        ready.do(WorkerUnready(FAR, FIRST, "it was down"))
        assert ready.record().answering


class TestEnd:
    """It is let go after its answers, and comes back with the next request."""

    def test_unload(self, ready):
        assert [stop.model for stop in of_kind(ready.do(UnloadRequested(FAR)), StopWorker)] == [FAR]
        assert of_kind(ready.do(WorkerExited(FAR, FIRST)), StartWorker) == []
        assert ready.record().state is WorkerState.STOPPED
        _, effects = ready.ask()
        assert of_kind(effects, StartWorker) == [StartWorker(FAR, Generation(2), REMOTE, (0,))]

    def test_after_its_answers(self, ready):
        ticket, _ = ready.ask()
        assert of_kind(ready.do(UnloadRequested(FAR)), StopWorker) == []
        assert ready.record().state is WorkerState.DRAINING
        assert len(of_kind(ready.do(RequestFinished(ticket)), StopWorker)) == 1

    def test_forced(self, ready):
        ticket, _ = ready.ask()
        effects = ready.do(UnloadRequested(FAR, force=True))
        assert [cut.ticket for cut in of_kind(effects, CutRequest)] == [ticket]
        assert len(of_kind(effects, StopWorker)) == 1

    def test_removed_from_the_configuration(self, ready):
        assert len(of_kind(ready.do(Configured((), ready.devices)), StopWorker)) == 1
        ready.do(WorkerExited(FAR, FIRST))
        assert FAR not in ready.scheduler.state.models

    def test_shutdown(self, ready):
        assert len(of_kind(ready.do(ShutdownRequested()), StopWorker)) == 1


class TestByWorker:
    """A worker here asks for its answers: it takes nothing, either, and comes back by itself."""

    @pytest.fixture
    def ready(self) -> Clock:
        clock = Clock(far(by_worker=True, preload=True))
        assert of_kind(clock.started, StartWorker) == [StartWorker(FAR, FIRST, REMOTE, (0,))]
        clock.do(WorkerReady(FAR, FIRST))
        return clock

    def test_requests_wait_for_it(self, ready):
        ready.do(WorkerUnready(FAR, FIRST, "it ended"))
        ticket, effects = ready.ask()
        assert effects == []
        ready.do(WorkerExited(FAR, FIRST, Crash(CrashClass.UNKNOWN, "it ended")))
        (start,) = of_kind(ready.do(Tick(), after=60), StartWorker)
        ready.do(WorkerReady(FAR, start.generation))
        assert [*ready.record().in_flight] == [ticket]

    def test_what_cant_be_ended_blocks_no_device(self, ready):
        ready.do(UnloadRequested(FAR))
        effects = ready.do(WorkerUnkillable(FAR, FIRST, "it is stuck"))
        assert of_kind(effects, Alert) == []
        _, effects = ready.ask()
        assert [reject.code for reject in of_kind(effects, Reject)] == [RejectCode.LOAD_FAILED]
        ready.do(WorkerExited(FAR, FIRST))
        _, effects = ready.ask()
        assert [start.generation for start in of_kind(effects, StartWorker)] == [2]

    def test_handed_over(self):
        spec = far(by_worker=True)
        clock = Clock(spec)
        assert of_kind(clock.started, StartWorker) == []
        clock.do(WorkerAdopted(spec, Generation(3), REMOTE, (), (TicketId("theirs"),)))
        assert (clock.record().state, clock.record().generation) == (WorkerState.READY, 3)
        assert clock.do(Configured((far(by_worker=True, preload=True),), clock.devices)) == []
