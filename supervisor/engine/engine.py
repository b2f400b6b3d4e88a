"""The engine, the single writer: it owns the scheduler, passes events to it, and executes its effects.

`post()` is synchronous and runs on the event loop's thread, so one event is handled completely (state changed, effects
started) before other code can run. Effects never wait: each worker has its own task that starts and stops it and reports
by further events. An event posted from within an effect is handled right after the current one.

A request begins with `ask()`, which returns its ticket; if no worker is free, `admitted()` waits for one. The caller
calls `finish()` once for every admitted ticket. When `admitted()` raises, or is cancelled, the ticket is finished already.

Callers that wait for other changes (a load, an unload, a lease) check the state after each event.

After a handover the successor schedules. This engine then makes no more decisions: it reports each request that ends, and
all waiting callers get HandedOverError.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

import structlog

from supervisor.core.admission.waiting import first_to_serve
from supervisor.core.decisions import DecisionLog
from supervisor.core.demand import DEFAULT_DEMAND, Demand
from supervisor.core.effects import (
    Alert,
    AskClients,
    CutRequest,
    Decided,
    Dispatch,
    Effect,
    Learn,
    LearnLoad,
    Reject,
    StartWorker,
    StopWorker,
)
from supervisor.core.events import (
    ClientsRead,
    Event,
    LeaseRequested,
    LoadRequested,
    Mishandled,
    RequestArrived,
    RequestFinished,
    ShutdownRequested,
    Tick,
    UnloadRequested,
    WorkerAdopted,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
)
from supervisor.core.model_state import ModelState
from supervisor.core.recovery import Recovery
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import SERVES, Crash, CrashClass, ModelId, RejectCode, StopCause, TicketId, WorkerState
from supervisor.engine.recording import Recording
from supervisor.engine.sampling import Sampling
from supervisor.engine.status import ReadDoor
from supervisor.engine.ticket import Client, HandedOverError, Ticket, blocking_reads, rejection
from supervisor.engine.waits import Waits, WaitTrace
from supervisor.errors import LeaseUnavailableError, NotFoundError, UnavailableError
from supervisor.fleet.fleet import Fleet
from supervisor.host.memory.memory import HolderPids, MemorySampler, WorkerKey

log = structlog.get_logger("llmux.engine")

MOST_RECORDINGS = 4
DROPPED_S = 1.0  # minimum time to the next tick after a dropped event

Observer = Callable[[Event, Sequence[Effect]], None]
"""Gets an event and its effects. Must return at once, post nothing and raise nothing."""


class Engine(ReadDoor):
    """Owns all scheduling state, and changes it. Use from the event loop's thread only.

    Code that only reads the state uses the `ReadDoor`.
    """

    def __init__(
        self,
        fleet: Fleet,
        sampler: MemorySampler,
        learn: Callable[[Learn | LearnLoad], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(Scheduler(), DecisionLog(), time.monotonic)
        self._recovery = Recovery(self._scheduler)
        self._recordings = set[Recording]()
        self.last_decision_s = 0.0  # duration of the scheduler's last decision, except for routine requests
        self.before_line: Callable[[], None] = lambda: None  # called before a log line, to write earlier lines first
        self.observers: list[Observer] = []  # called for each event, after its effects have started
        self.traffic: list[Callable[[], None]] = []  # called instead when a request was dispatched at once, or ended
        self._fleet = fleet
        self._sampler = sampler
        self._learn = learn  # stores learned footprints and load times
        self._tickets: dict[TicketId, Ticket] = {}
        self._waits = Waits()
        self._events: deque[Event] = deque()
        self._handling = False
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = float("inf")
        # No tick before this time: a dropped tick would otherwise repeat at once, endlessly.
        self._rests_until = float("-inf")
        self._impatient = False
        self._sampling = Sampling(
            [partial(self._read_memory, part) for part in sampler.parts], self._scheduler.is_impatient
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.Future[None]] = []
        self._finished: Callable[[TicketId], None] | None = None  # set iff a successor schedules

    # ----------------------------------------------------------------------------------------------------------- events

    def post(self, event: Event) -> None:
        """Handle `event` now, or right after the one being handled. Never blocks, never raises for operational trouble.

        A bug in handling an event fails only the model at fault: see `core.recovery`. If recovery fails, `event` is dropped, and
        the exception is raised after the following events were handled.
        """
        if self._finished is not None:
            if type(event) is RequestFinished:
                self._finished(event.ticket)
            return
        self._events.append(event)
        if not self._handling:
            self._handle_posted(event)

    def _handle_posted(self, event: Event | None) -> None:
        """Handle all posted events. Raises only an exception from handling `event`."""
        self._handling = True
        mistake: Exception | None = None
        settled = True
        while self._events:
            following = self._events.popleft()
            began = self.clock()
            try:
                effects = self._scheduler.handle(following, began)
            except Exception as error:
                log.critical("event.mishandled", happened=repr(following), exc_info=error)
                recovered = self._recover(following, began, error)
                if recovered is None:
                    self._rests_until, settled = began + DROPPED_S, False
                    mistake = error if following is event else mistake
                    continue
                following, effects = recovered
            else:
                self._recovery.note(following, began)
            took = self.clock() - began
            self._decisions.note(effects, began)
            for effect in effects:
                try:
                    self._carry_out(effect)
                except Exception as error:
                    log.exception("effect.failed", effect=repr(effect))
                    self._report_failed(effect, error)
            is_settled = self._is_settled(following, effects)
            if not is_settled:
                if settled:
                    settled = False
                    self.last_decision_s = took
                if isinstance(following, (WorkerReady, WorkerExited, LoadRequested)):
                    self._sampling.soon()
            self._notify_observers(began, following, effects, is_settled=is_settled)
        self._handling = False
        if not settled:
            self._look_ahead()
        if self._watchers:
            self._wake_watchers()
        if mistake is not None:
            raise mistake

    def _recover(self, event: Event, now: float, mistake: Exception) -> tuple[Event, list[Effect]] | None:
        """Restore the state and return the event that was handled instead, with its effects; None: the event was dropped.

        Raises nothing, so that later events are handled in any case.
        """
        try:
            recovered = self._recovery.recover(event, now, mistake)
        except Exception:
            log.critical("state.not_recovered", exc_info=True)
            return None
        if recovered is None:
            log.critical("event.dropped", happened=repr(event))
        return recovered

    def _notify_observers(
        self, at: float, event: Event, effects: Sequence[Effect], *, is_settled: bool = False
    ) -> None:
        """Call all recordings and observers. Their exceptions must not stop the engine."""
        try:
            for recording in tuple(self._recordings) if self._recordings else ():
                recording.add(at, event, effects)
            if is_settled:
                for notice in self.traffic:
                    notice()
                return
            self._waits.update(self._scheduler.state, at)
            happened = event.event or event if type(event) is Mishandled else event
            for observe in self.observers:
                observe(happened, effects)
        except Exception as error:
            log.critical("event.mishandled", happened=repr(event), exc_info=error)

    def _is_settled(self, event: Event, effects: list[Effect]) -> bool:
        """Whether a request was dispatched at once, or ended while none waited: the usual case, which moves no deadline."""
        if type(event) is RequestArrived:
            return len(effects) == 1 and type(effects[0]) is Dispatch
        return type(event) is RequestFinished and not effects and not self._scheduler.state.wanted

    def _look_ahead(self) -> None:
        """Set the timer for the next deadline; read the memory soon if a load waits for memory."""
        was_impatient, self._impatient = self._impatient, self._scheduler.is_impatient()
        if self._impatient and not was_impatient:
            self._sampling.soon()
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = self._scheduler.deadline(self.clock())
        if deadline >= self._tick_at:
            return
        if self._tick is not None:
            self._tick.cancel()
        self._tick_at = deadline
        delay = max(0.0, max(deadline, self._rests_until) - self.clock())
        self._tick = asyncio.get_running_loop().call_later(delay, self._on_tick)

    def _on_tick(self) -> None:
        self._tick, self._tick_at = None, float("inf")
        self.post(Tick())

    # ---------------------------------------------------------------------------------------------------------- effects

    def _report_failed(self, effect: Effect, error: Exception) -> None:
        """Answer a failed effect, so that the scheduler doesn't wait for ever."""
        message = f"llmux failed to do it: {error!r}"
        if isinstance(effect, StartWorker):
            self._events.append(WorkerExited(effect.model, effect.generation, Crash(CrashClass.UNKNOWN, message)))
        elif isinstance(effect, StopWorker):
            self._events.append(WorkerUnkillable(effect.model, effect.generation, message))
        elif isinstance(effect, Dispatch):
            self._reject_ticket(Reject(effect.ticket, RejectCode.LOAD_FAILED, message))
            self._events.append(RequestFinished(effect.ticket))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatch_ticket(effect)
            case Decided(kind, model, reason):
                self.before_line()
                log.info("decision.made", kind=kind, model=model, reason=reason)
            case Reject():
                self._reject_ticket(effect)
            case StartWorker():
                self._fleet.start(effect, self.post)
            case StopWorker():
                if not self._fleet.stop(effect):  # its exit event is queued, or was dropped
                    self._events.append(WorkerExited(effect.model, effect.generation))
            case CutRequest(ticket_id, reason):
                if (ticket := self._tickets.get(ticket_id)) is not None:
                    ticket.cut(reason)
            case AskClients(model, generation):
                self._events.append(ClientsRead(model, generation, blocking_reads(self._tickets.values(), effect)))
            case Learn(model, device, mib=mib):
                self._store_learned(effect)
                log.info("footprint.learned", model=model, device=device, mib=mib)
            case LearnLoad():
                self._store_learned(effect)
            case Alert(code, message, device, model):
                self.before_line()
                log.warning("alert.raised", code=code, message=message, device=device, model=model)
            case _:
                assert_never(effect)

    def _store_learned(self, learned: Learn | LearnLoad) -> None:
        if self._learn is not None:
            self._tasks.add(task := asyncio.create_task(self._learn(learned)))
            task.add_done_callback(self._tasks.discard)

    def _dispatch_ticket(self, effect: Dispatch) -> None:
        ticket = self._tickets[effect.ticket]
        ticket.model, ticket.generation = effect.model, effect.generation
        ticket.upstream = self._fleet.upstream(effect.model, effect.generation)
        ticket.devices = self._scheduler.state.models[effect.model].devices
        ticket.admitted = self.clock()
        ticket.wake()

    def _reject_ticket(self, effect: Reject) -> None:
        ticket = self._tickets.get(effect.ticket)
        if ticket is not None:
            ticket.rejection = effect
            ticket.wake()

    # --------------------------------------------------------------------------------------------------------- requests

    def ask(
        self, ticket_id: TicketId, model: ModelId, demand: Demand = DEFAULT_DEMAND, client: Client | None = None
    ) -> Ticket:
        """Request a worker of `model`. If one is free, the ticket has an `upstream`; else await `admitted`.

        The engine interrupts `client` when it cuts the request. The caller must `finish()` the ticket.
        """
        ticket = Ticket(ticket_id, model, self.clock(), client=client)
        self._tickets[ticket_id] = ticket
        try:
            self.post(RequestArrived(ticket_id, model, demand))
        except BaseException:
            self.finish(ticket)
            raise
        return ticket

    async def admitted(self, ticket: Ticket, waits: list[WaitTrace], name: str) -> None:
        """Wait until a worker takes the request, and append the wait to `waits`. Returns at once if a worker has it already.

        `name`: the model's name in the client's request, for errors. After an error or a cancellation the
        ticket is finished. Raises NotFoundError, RateLimitError, BudgetError, QueueTimeoutError, UnavailableError, and
        HandedOverError after a handover.
        """
        if ticket.upstream is None and ticket.rejection is None and self._finished is None:
            ticket.waiter = asyncio.get_running_loop().create_future()
            wait = self._waits.begin(ticket.model, ticket.arrived)
            waits.append(wait)
            try:
                await ticket.waiter
            except asyncio.CancelledError:
                self.finish(ticket)
                raise
            finally:
                wait.end(ticket.admitted or self.clock())
        if ticket.upstream is None:
            del self._tickets[ticket.id]
            raise HandedOverError if ticket.rejection is None else rejection(ticket.rejection, name)

    def look(self, ticket_id: TicketId, model: ModelId) -> Ticket | None:
        """A ticket for a request that only reads a worker's state; None: no worker answers.

        Such a request never waits and isn't counted. Don't `finish()` its ticket.
        """
        found = self._scheduler.state.models.get(model)
        for each in () if found is None else self._scheduler.state.replicas(found):
            if each.answering:
                now = self.clock()
                upstream = self._fleet.upstream(each.id, each.generation)
                return Ticket(ticket_id, each.id, now, each.generation, upstream, admitted=now)
        return None

    async def may_go_to_another(self, ticket: Ticket, within_s: float) -> bool:
        """Whether the request may be retried at another worker, as its own takes no more. Waits up to `within_s` seconds.

        False for a request that was cut: a retry would reload a model that was just unloaded.
        """
        if self._finished is not None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (
                    (found := self._scheduler.state.models.get(ticket.model)) is not None
                    and found.generation == ticket.generation
                    and found.answering
                ):
                    await self._next_event()
                return ticket.cut_reason is None
        return False

    async def why_ended(self, ticket: Ticket, within_s: float) -> str | None:
        """Why the ticket's worker ended, as a text for everybody. None: still unknown after `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (
                    self._finished is None
                    and (found := self._scheduler.state.models.get(ticket.model)) is not None
                    and found.generation == ticket.generation
                    and not found.spec.is_elsewhere
                ):
                    if found.crash is not None and not found.has_worker:
                        return found.crash.summary
                    await self._next_event()
        return None

    def finish(self, ticket: Ticket, tokens: int = 0, *, served: bool = True) -> None:
        """End the request; see `RequestFinished`. Call this exactly once for every admitted ticket."""
        del self._tickets[ticket.id]
        ticket.client = None
        self.post(RequestFinished(ticket.id, tokens, served))

    # ---------------------------------------------------------------------------------------- loads, unloads and leases

    async def load(self, model: ModelId, requested_name: str | None = None) -> None:
        """Load `model` and return when its first replica is ready. Cancelling only stops waiting.

        `requested_name`: the model's name in errors. Raises NotFoundError, and UnavailableError when it can't be loaded.
        """
        name = requested_name or model
        self.post(LoadRequested(model))
        while True:
            self._check_handed_over()
            known = self._scheduler.state.models.get(model)
            if known is None:
                raise NotFoundError(f"There is no model {name!r}.", code="model_not_found", param="model")
            found = first_to_serve(self._scheduler.state, known)
            if found.state is WorkerState.READY:
                if found.answering:
                    return
                if found.spec.is_elsewhere:
                    raise UnavailableError(f"{name}: {found.life.reason}", code="remote_unavailable")
            self._check_quarantine(found, name)
            if found.state is WorkerState.FAILED or (
                found.state in {WorkerState.STOPPED, WorkerState.BACKOFF} and found.asked_at is None
            ):
                crash = found.crash or Crash(CrashClass.UNKNOWN, "")
                code = "runtime_not_installed" if crash.kind is CrashClass.NOT_INSTALLED else "load_failed"
                message = f"{name} was not loaded: {found.life.reason}"
                raise UnavailableError(message, code=code, detail=crash.log_tail)
            await self._next_event()

    async def unload(
        self, model: ModelId, requested_name: str | None = None, order: UnloadRequested | None = None
    ) -> None:
        """Unload `model` with all its replicas and return when their memory is back. Requests may load it again.

        Cancelling only stops waiting. `requested_name`: the model's name in errors. Raises UnavailableError when a worker can't be
        killed, or the return of its memory takes too long.
        """
        state = self._scheduler.state
        replicas = state.replicas(state.models[model]) if model in state.models else []
        before = {each.id: each.generation for each in replicas if each.has_worker}
        self.post(order or UnloadRequested(model))
        while True:
            self._check_handed_over()
            found = [each for name, start in before.items() if (each := state.current(name, start)) is not None]
            left = [each for each in found if each.state is not WorkerState.READY]
            if not left:
                return
            for each in left:
                self._check_quarantine(each, requested_name or model)
            await self._next_event()

    async def lease(self, request: LeaseRequested) -> None:
        """Request memory for another program's process, and return when it is granted. See `engine.partners`.

        Cancelling only stops waiting: the caller must post LeaseEnded at the end, also after an error. Raises
        LeaseUnavailableError, or UnavailableError during the shutdown.
        """
        self.post(request)
        while True:
            self._check_handed_over()
            found = self._scheduler.state.models.get(request.spec.id)
            if found is None or self._scheduler.state.shutting_down:
                raise UnavailableError("llmux is shutting down; try again in a moment.", code="shutting_down")
            if found.state is WorkerState.READY:
                return
            if found.asked_at is None:
                raise LeaseUnavailableError(f"{request.partner.holder} got no lease: {found.life.reason}")
            await self._next_event()

    # --------------------------------------------------------------------------------------------- waiting for a change

    async def _next_event(self) -> None:
        """Wait until the next event has been handled."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _check_quarantine(self, model: ModelState, name: str) -> None:
        """Raise UnavailableError if the worker can't be killed, or its memory is long overdue: both may last for ever."""
        reason = self._scheduler.state.ledger.quarantined_by(model.holder)
        if reason is not None:
            raise UnavailableError(f"{name}'s worker {reason}", code="device_quarantined")

    def _check_handed_over(self) -> None:
        if self._finished is not None:
            raise HandedOverError

    # ------------------------------------------------------------------------------------------------------- recordings

    def recording(self) -> Recording:
        """Record the scheduler's events and effects from now on. Raises UnavailableError beyond `MOST_RECORDINGS`."""
        if len(self._recordings) >= MOST_RECORDINGS:
            raise UnavailableError(f"{len(self._recordings)} recordings are made already; end one.", retry_after_s=10.0)
        return Recording(self._scheduler, self.clock(), self._recordings)

    # ------------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to sample memory. Call it once, on the running loop."""
        self._sampling.start()

    def longest_drain_s(self) -> float:
        """The longest time that running requests may continue when all workers are stopped."""
        state = self._scheduler.state
        return max((state.admission.ordered_drain_s(model.spec) for model in state.models.values()), default=0.0)

    async def shutdown(self) -> None:
        """Drain and stop every worker; returns when each has ended or can't be killed. Does not wait for their memory."""
        self.post(ShutdownRequested())
        while any(
            found.has_worker and not found.exited and not found.stuck for found in self._scheduler.state.models.values()
        ):
            await self._next_event()
        self._stop_background_work()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop_background_work(self) -> None:
        """Stop reading memory, setting timers and recording."""
        self._sampling.stop()
        if self._tick is not None:
            self._tick.cancel()
        for recording in tuple(self._recordings):
            recording.end()

    # ----------------------------------------------------------------------------------------------------------- memory

    async def sample(self) -> None:
        """Read the memory of all devices and workers once, and post the readings."""
        await asyncio.gather(*(self._read_memory(part) for part in self._sampler.parts))

    async def _read_memory(self, sampler: MemorySampler) -> None:
        for reading in (await sampler.sample({**self._fleet.holders(), **self._measured_partners()})).by_device():
            try:
                self.post(reading)
            except Exception:  # block the devices: an older reading must not allow a load
                self.post(replace(reading, devices=tuple(replace(each, stale=True) for each in reading.devices)))
                raise

    def _measured_partners(self) -> dict[WorkerKey, HolderPids]:
        """The processes of all partners that hold a lease and gave a process id."""
        return {
            model.holder: HolderPids(model.devices, (model.partner.pid,), loading=False)
            for model in self._scheduler.state.models.values()
            if model.partner is not None and model.partner.pid is not None and model.state is WorkerState.READY
        }

    # --------------------------------------------------------------------------------------------------------- handover

    def freeze(self) -> None:
        """Handle no events until `thaw` or `hand_over`: posted events wait. Don't call this while an event is handled."""
        assert not self._handling
        self._handling = True

    def thaw(self) -> None:
        """Handle the waiting events, and end the freeze. Harmless when not frozen."""
        self._handle_posted(None)

    async def calm(self) -> None:
        """After HandoverRequested: wait until no worker is starting or stopping. Raises UnavailableError if one can't be stopped."""
        while True:
            busy = [
                found
                for found in self._scheduler.state.models.values()
                if found.has_worker and found.state not in SERVES and not found.spec.is_elsewhere
            ]
            if not busy:
                return
            for found in busy:
                self._check_quarantine(found, found.id)
            await self._next_event()

    def adoptions(self) -> tuple[WorkerAdopted, ...]:
        """The serving workers, each as the event with which a successor's scheduler adopts it."""
        state = self._scheduler.state
        return tuple(
            WorkerAdopted(
                replace(model.spec, preload=False),
                model.generation,
                model.devices,
                tuple(lease.mib for lease in state.ledger.leases_of(model.holder)),
                tuple(model.in_flight),
                model.ready_at,
                model.last_used,
                model.load_s,
                model.drain is not None and model.drain.cause is StopCause.OPERATOR,
                model.kept_until,
                tuple(model.in_flight.values()),
                model.last_priority,
            )
            for model in state.models.values()
            if model.state in SERVES and not model.spec.is_elsewhere and model.partner is None
        )

    def pins(self) -> dict[ModelId, bool]:
        """The models that an operator pinned (True) or unpinned (False)."""
        return {model.id: model.pin for model in self._scheduler.state.models.values() if model.pin is not None}

    def unloaded_by_operator(self) -> tuple[ModelId, ...]:
        """The models that an operator unloaded and that weren't requested since."""
        models = self._scheduler.state.models.values()
        return tuple(model.id for model in models if model.unloaded_by_operator and model.spec.replica_of is None)

    def hand_over(self, finished: Callable[[TicketId], None]) -> None:
        """The successor schedules from now on: make no more decisions, and call `finished` for each request that ends.

        All callers that wait for a worker, a load, an unload or a lease get HandedOverError.
        """
        self._finished = finished
        self._stop_background_work()
        for event in self._events:
            if type(event) is RequestFinished:
                finished(event.ticket)
        self._events.clear()
        for ticket in list(self._tickets.values()):
            ticket.wake()
        self._wake_watchers()
