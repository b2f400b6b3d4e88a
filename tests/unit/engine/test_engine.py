"""The engine with a fleet of puppets: whatever goes wrong on the way, nobody waits for ever and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from supervisor.core import operators, timers
from supervisor.core.effects import StartWorker, StopWorker
from supervisor.core.events import (
    Configured,
    DeviceSample,
    Event,
    MemorySampled,
    PinRequested,
    RequestArrived,
    Respecified,
    Tick,
    UnloadRequested,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
)
from supervisor.core.memory.device_ledger import Holder
from supervisor.core.memory.ledger import Ledger
from supervisor.core.types import Crash, CrashClass, DeviceSpec, ModelId, TicketId, WorkerState
from supervisor.core.workers import reports, termination
from supervisor.engine.engine import Engine
from supervisor.engine.recording import replay
from supervisor.engine.ticket import HandedOverError, Ticket
from supervisor.errors import NotFoundError, UnavailableError
from tests.support.simulation import GPU, model

A, B = ModelId("a"), ModelId("b")


class Fleet:
    """Does what it is told by the test, and remembers what it was told by the engine."""

    def __init__(self) -> None:
        self.started: list[StartWorker] = []
        self.stopped: list[StopWorker] = []
        self.gone: set[ModelId] = set()
        self.refuse_start: Exception | None = None
        self.refuse_stop: Exception | None = None
        self.refuse_upstream: Exception | None = None
        self.at_start: Callable[[StartWorker, Callable[[Event], None]], None] = lambda effect, post: None

    def start(self, effect: StartWorker, post: Callable[[Event], None]) -> None:
        if self.refuse_start is not None:
            raise self.refuse_start
        self.started.append(effect)
        self.at_start(effect, post)

    def stop(self, effect: StopWorker) -> bool:
        self.stopped.append(effect)
        if self.refuse_stop is not None:
            raise self.refuse_stop
        return effect.model not in self.gone

    def upstream(self, name: ModelId, generation: int) -> object:
        if self.refuse_upstream is not None:
            raise self.refuse_upstream
        return f"{name}:{generation}"

    def holders(self) -> Mapping[object, object]:
        return {}


class Sampler:
    def __init__(self) -> None:
        self.free = 16384
        self.failures = 0
        self.stale = False
        self.clock: Callable[[], float] = lambda: 0.0
        self.parts = (self,)

    def devices(self) -> tuple[object, ...]:
        return ()

    async def sample(self, holders: object) -> MemorySampled:
        if self.failures:
            self.failures -= 1
            raise ValueError("a mistake of the sampler's")
        return MemorySampled((DeviceSample(GPU, self.free, self.stale, 0),), (), self.clock())


class Bench:
    """An engine, its puppets, and two models that don't fit together."""

    def __init__(self) -> None:
        self.fleet, self.sampler = Fleet(), Sampler()
        self.engine = Engine(self.fleet, self.sampler)  # type: ignore[arg-type]  # puppets
        self.sampler.clock = self.engine.clock

    async def configure(self, **more: object) -> None:
        models = (model("a", 10000, **more), model("b", 10000))
        self.engine.post(Configured(models, (DeviceSpec(GPU, 16384, 512),)))
        await self.engine.sample()

    def become_ready(self) -> None:
        last = self.fleet.started[-1]
        self.engine.post(WorkerReady(last.model, last.generation))

    def exit(self, crash: Crash | None = None) -> None:
        last = self.fleet.started[-1]
        self.engine.post(WorkerExited(last.model, last.generation, crash))

    def ask(self, name: ModelId = A, ticket: str = "1") -> asyncio.Task:
        return asyncio.create_task(self.admit(ticket, name))

    async def admit(self, ticket: str = "1", name: ModelId = A) -> Ticket:
        asked = self.engine.ask(TicketId(ticket), name)
        if asked.upstream is None:
            await self.engine.admitted(asked, [], name)
        return asked

    @property
    def world(self):
        return self.engine._scheduler.state

    def leftover_groups(self) -> tuple[int, int, int]:
        return len(self.engine._tickets), len(self.world.tickets), len(self.world.queue)


@pytest.fixture
async def bench():
    bench = Bench()
    await bench.configure()
    yield bench
    bench.world.check()
    bench.engine._sampling.stop()
    if bench.engine._tick is not None:
        bench.engine._tick.cancel()


async def soon(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not predicate():
            await asyncio.sleep(0.001)


class TestRequests:
    """A ticket is given out once and given back once, whatever happens to whoever waits for it."""

    async def test_waits_until_its_worker_is_ready(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        assert not asked.done()
        bench.become_ready()
        ticket = await asked
        assert ticket.upstream == "a:1"
        bench.engine.finish(ticket)
        assert bench.leftover_groups() == (0, 0, 0)

    async def test_a_rejection_keeps_nothing_of_its_request(self, bench):
        class Body:
            pass

        async def ask(body: object) -> None:
            await bench.admit("1", ModelId("nobody"))

        body = Body()
        kept = weakref.ref(body)
        gc.disable()
        try:
            with contextlib.suppress(NotFoundError):
                await ask(body)
            del body
            assert kept() is None
        finally:
            gc.enable()

    async def test_leaving_while_queued(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert bench.leftover_groups() == (0, 0, 0)
        assert bench.fleet.stopped, "the load is cancelled"

    async def test_leaving_in_the_moment_of_dispatch(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert bench.leftover_groups() == (0, 0, 0)

    async def test_leaving_in_the_moment_of_refusal(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.engine.post(UnloadRequested(A, force=True))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert bench.leftover_groups() == (0, 0, 0)


class TestAnother:
    """A request that found nobody at its worker's port may go to the next worker, unless it was cut."""

    @pytest.fixture
    async def ticket(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        return await asked

    async def test_not_while_its_worker_serves(self, bench, ticket):
        bench.engine.finish(ticket)
        assert not await bench.engine.may_go_to_another(ticket, 0)

    async def test_when_its_worker_has_ended(self, bench, ticket):
        bench.engine.finish(ticket)
        bench.exit(Crash(CrashClass.UNKNOWN, "killed"))
        assert await bench.engine.may_go_to_another(ticket, 0)

    async def test_not_when_it_was_unloaded_by_force(self, bench, ticket):
        bench.engine.post(UnloadRequested(A, force=True))
        bench.engine.finish(ticket)
        assert not await bench.engine.may_go_to_another(ticket, 0)


class TestMistakes:
    """A mistake of ours in one place costs what it touches, never the rest."""

    async def test_a_worker_that_can_not_be_started_counts_as_crashed(self, bench):
        bench.engine.start()
        bench.fleet.refuse_start = KeyError("a")
        asked = bench.ask()
        await soon(lambda: bench.world.models[A].state is WorkerState.BACKOFF)
        bench.fleet.refuse_start = None
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        bench.engine.finish(await asked)

    async def test_effects_after_one_that_failed_are_carried_out(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.fleet.refuse_stop = RuntimeError("no")
        bench.engine.post(UnloadRequested(A, force=True))
        with pytest.raises(UnavailableError):
            await asked

    async def test_a_worker_that_can_not_be_told_to_stop_is_given_up(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        bench.engine.finish(await asked)
        bench.fleet.refuse_stop = RuntimeError("no")
        bench.engine.post(UnloadRequested(A))
        assert bench.world.models[A].stuck
        async with asyncio.timeout(10):
            await bench.engine.shutdown()

    async def test_a_worker_whose_exit_was_dropped_has_exited_when_it_is_to_be_stopped(self, bench, monkeypatch):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        bench.engine.finish(await asked)
        exited = termination.exited

        def stumble(state: object, step: object, event: WorkerExited) -> None:
            if event.crash is not None:
                raise ZeroDivisionError("what is said of the crash can't be handled")
            exited(state, step, event)  # type: ignore[arg-type]

        monkeypatch.setattr(termination, "exited", stumble)
        bench.fleet.gone.add(A)
        bench.exit(Crash(CrashClass.UNKNOWN, "it ended"))
        await bench.engine.sample()
        assert bench.world.models[A].state is WorkerState.FAILED
        asked = bench.ask(B, "2")
        await soon(lambda: bench.fleet.started[-1].model == B)
        bench.become_ready()
        bench.engine.finish(await asked)

    async def test_a_model_that_the_core_stumbles_over_has_failed_and_the_others_are_served(self, bench, monkeypatch):
        begin = Ledger.begin

        def stumble(self: Ledger, holder: Holder, *more: object, **named: object) -> None:
            if holder[0] == A:
                raise ZeroDivisionError
            begin(self, holder, *more, **named)

        monkeypatch.setattr(Ledger, "begin", stumble)
        happened: list[Event] = []
        bench.engine.observers.append(lambda event, _: happened.append(event))
        with bench.engine.recording() as recording:
            with pytest.raises(UnavailableError, match=r"llmux made a mistake over it \(ZeroDivisionError\)") as caught:
                await bench.admit("1")
            assert caught.value.code == "model_failed"
            assert [type(event) for event in happened] == [RequestArrived]
            bench.world.check()
            with pytest.raises(UnavailableError, match="tried again in 10 min"):
                await bench.admit("2")
            asked = bench.ask(B, "3")
            await soon(lambda: bool(bench.fleet.started))
            bench.become_ready()
            bench.engine.finish(await asked)
            lines = recording.take()
        assert all(replayed.is_same for replayed in replay(lines))
        assert bench.leftover_groups() == (0, 0, 0)
        down = asyncio.create_task(bench.engine.shutdown())
        await soon(lambda: bool(bench.fleet.stopped))
        bench.exit()
        async with asyncio.timeout(10):
            await down

    async def test_events_after_one_of_which_nothing_can_be_mended_are_handled(self, bench, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(operators, "pin", lambda *_: 1 / 0)
            patch.setattr(bench.engine._recovery, "recover", lambda *_: 1 / 0)
            with pytest.raises(AssertionError, match="division by zero"):
                bench.engine.post(PinRequested(A, pin=True))
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        bench.engine.finish(await asked)

    async def test_a_reading_that_the_core_can_not_take_is_none(self, bench, monkeypatch):
        sampled = reports.sampled

        def stumble(state: object, step: object, event: MemorySampled) -> None:
            if not event.devices[0].stale:
                raise ZeroDivisionError("division by zero")
            sampled(state, step, event)  # type: ignore[arg-type]

        monkeypatch.setattr(reports, "sampled", stumble)
        bench.engine._recovery._save_state()  # what was read before the mistake
        with pytest.raises(AssertionError, match="division by zero"):
            await bench.engine.sample()
        assert bench.world.ledger.view(GPU).blocked == "its memory can't be read"

    async def test_a_tick_that_the_core_can_not_take_does_not_come_again_at_once(self, bench, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(timers, "fire", lambda *_: 1 / 0)
            bench.engine._recovery._save_state()
            with pytest.raises(AssertionError, match="division by zero"):
                bench.engine.post(Tick())
            bench.world.wake(0.0, A)
            bench.engine._look_ahead()
        assert bench.engine._tick is not None
        assert bench.engine._tick.when() >= bench.engine._rests_until > 0

    async def test_a_ticket_without_an_upstream_is_refused_and_given_back(self, bench):
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.fleet.refuse_upstream = KeyError("a")
        bench.become_ready()
        with pytest.raises(UnavailableError):
            await asked
        assert bench.leftover_groups() == (0, 0, 0)

    async def test_an_event_that_the_core_can_not_take_costs_only_itself(self, bench, monkeypatch):
        handle = bench.engine._scheduler.handle

        def stumble(event: Event, now: float):
            if isinstance(event, Respecified):
                raise AssertionError("an impossible step")
            return handle(event, now)

        monkeypatch.setattr(bench.engine._scheduler, "handle", stumble)

        def start(effect: StartWorker, post: Callable[[Event], None]) -> None:
            post(Respecified(model("a", 1)))  # handled after the current event
            post(WorkerReady(effect.model, effect.generation))

        bench.fleet.at_start = start
        ticket = await bench.admit("1")
        bench.engine.finish(ticket)
        assert bench.leftover_groups() == (0, 0, 0)

    async def test_an_observer_that_fails_stops_nobody(self, bench):
        bench.engine.observers.append(lambda *_: 1 / 0)
        endless = []
        endless.append(endless)
        with bench.engine.recording() as recording:
            bench.engine._notify_observers(0.0, endless, [])
            assert recording.broke_off
        bench.fleet.at_start = lambda effect, post: post(WorkerReady(effect.model, effect.generation))
        ticket = await bench.admit("1")
        bench.engine.finish(ticket)
        assert bench.leftover_groups() == (0, 0, 0)

    async def test_an_arrival_that_the_core_can_not_take_leaves_no_ticket(self, bench, monkeypatch):
        def stumble(event: Event, now: float):
            raise AssertionError("an impossible step")

        with monkeypatch.context() as patch:
            patch.setattr(bench.engine._scheduler, "handle", stumble)
            with pytest.raises(AssertionError):
                await bench.admit("1")
        assert bench.leftover_groups() == (0, 0, 0)

    async def test_sampling_goes_on_after_a_reading_that_failed(self, bench):
        bench.sampler.failures = 1
        bench.world.ledger._devices[GPU].free_mib = None
        bench.engine.start()
        asked = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        bench.engine.finish(await asked)
        down = asyncio.create_task(bench.engine.shutdown())
        await soon(lambda: bool(bench.fleet.stopped))
        bench.exit()
        async with asyncio.timeout(10):
            await down


class TestOperators:
    """Load, unload and shutdown return, or say why they can't."""

    async def test_load_of_a_model_that_can_not_be_killed(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.engine.post(WorkerUnkillable(A, 1, "still there"))  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match="still there"):
                await loading

    async def test_unload_of_a_model_that_can_not_be_killed(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        await loading
        unloading = asyncio.create_task(bench.engine.unload(A))
        await soon(lambda: bool(bench.fleet.stopped))
        bench.engine.post(WorkerUnkillable(A, 1, "still there"))  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match="still there"):
                await unloading

    async def test_unload_returns_when_the_memory_is_back(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        await loading
        bench.sampler.free = 6384
        await bench.engine.sample()
        unloading = asyncio.create_task(bench.engine.unload(A))
        await soon(lambda: bool(bench.fleet.stopped))
        bench.exit()
        assert not unloading.done()
        bench.sampler.free = 16384
        await bench.engine.sample()
        async with asyncio.timeout(10):
            await unloading

    async def test_unload_does_not_wait_for_who_loads_it_again(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        await loading
        unloading = asyncio.create_task(bench.engine.unload(A))
        await soon(lambda: bool(bench.fleet.stopped))
        asked = bench.ask()
        await soon(lambda: len(bench.world.queue) == 1)
        bench.exit()
        await bench.engine.sample()
        async with asyncio.timeout(10):
            await unloading
        await soon(lambda: len(bench.fleet.started) == 2)
        bench.become_ready()
        bench.engine.finish(await asked)

    async def test_load_that_crashes_for_good_says_why(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.exit(Crash(CrashClass.BAD_ARGUMENTS, "unknown argument --x", ("last line",)))
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match="unknown argument --x"):
                await loading

    async def test_load_that_the_machine_refuses_again_and_again_says_why(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.exit(Crash(CrashClass.HOST, "No space left on device"))
        await bench.engine.sample()
        later = bench.engine.clock() + bench.world.limits.queue_wait_s
        bench.engine.clock = lambda: later
        bench.world.models[A].crashes = replace(bench.world.models[A].crashes, retry_at=later + 30)
        bench.world.wake(later + 30, A)
        bench.engine.post(Tick())
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match="No space left on device; next try"):
                await loading

    async def test_shutdown_does_not_wait_for_memory_or_for_what_can_not_be_killed(self, bench):
        loading = asyncio.create_task(bench.engine.load(A))
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        await loading
        bench.sampler.stale = True
        down = asyncio.create_task(bench.engine.shutdown())
        await soon(lambda: bool(bench.fleet.stopped))
        bench.exit()
        async with asyncio.timeout(10):
            await down


class TestLeaving:
    """A successor schedules from now on."""

    async def test_who_waits_goes_to_the_successor_and_who_runs_is_reported(self, bench):
        running = bench.ask()
        await soon(lambda: bool(bench.fleet.started))
        bench.become_ready()
        ticket = await running
        waiting = bench.ask(B, "2")
        loading = asyncio.create_task(bench.engine.load(B))
        await soon(lambda: len(bench.engine._tickets) == 2 and bool(bench.engine._watchers))
        finished: list[TicketId] = []
        bench.engine.hand_over(finished.append)
        async with asyncio.timeout(10):
            for who in (waiting, loading):
                with pytest.raises(HandedOverError):
                    await who
        bench.engine.finish(ticket)
        assert finished == [ticket.id]
        assert bench.engine._tickets == {}
