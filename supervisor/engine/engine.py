"""The single writer: it owns the scheduler, gives it events, and carries its effects out.

`post()` is synchronous and runs on the event loop's thread, so one event is handled completely (state changed, effects
started) before other code can run. Effects never wait: each worker has its own task that starts and stops it and reports
by further events. An event posted from within an effect is handled right after the current one.

`admit()` gives out a request's ticket and `finish()` takes it back. Every admitted ticket is finished: if the caller is
cancelled while it waits, `admit` does so itself.
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

from supervisor.core.decisions import DecisionLog
from supervisor.core.demand import ANY, Demand
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
    LoadAsked,
    Mishandled,
    RequestArrived,
    RequestFinished,
    ShutdownAsked,
    Tick,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
)
from supervisor.core.recovery import Recovery
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import Crash, CrashClass, ModelId, RejectCode, TicketId
from supervisor.engine.leaving import HandedOverError
from supervisor.engine.operating import Operating
from supervisor.engine.recording import Recording
from supervisor.engine.sampling import Sampling
from supervisor.engine.ticket import Client, Ticket, held_up, rejection
from supervisor.engine.waits import Wait, Waits
from supervisor.errors import UnavailableError
from supervisor.fleet.fleet import Fleet
from supervisor.io.memory import MemorySampler

log = structlog.get_logger("llmux.engine")

MOST_RECORDINGS = 4
DROPPED_S = 1.0  # until the next tick after an event that could not be handled

Observer = Callable[[Event, Sequence[Effect]], None]
"""Returns at once, posts nothing and raises nothing."""


class Engine(Operating):
    """Owns all scheduling state. Use from the event loop's thread only."""

    def __init__(
        self,
        fleet: Fleet,
        sampler: MemorySampler,
        learn: Callable[[Learn | LearnLoad], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._scheduler = Scheduler()
        self._recovery = Recovery(self._scheduler)
        self._decisions = DecisionLog()
        self._recordings = set[Recording]()
        self.clock = time.monotonic
        self.last_decision_s = 0.0  # what the scheduler took for the last event that was more than routine
        self.before_line: Callable[[], None] = lambda: None  # called before a line of the log that others come before
        self.observers: list[Observer] = []  # told of each event and its effects, once these are under way
        self.traffic: list[Callable[[], None]] = []  # told instead of requests that were dispatched at once, or ended
        self._fleet = fleet
        self._sampler = sampler
        self._learn = learn  # keeps what a model took, and how long its load
        self._tickets: dict[TicketId, Ticket] = {}
        self._waits = Waits()
        self._events: deque[Event] = deque()
        self._handling = False
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = float("inf")
        self._rests_until = float(
            "-inf"
        )  # no tick comes sooner: one that is dropped would come at once, again and again
        self._impatient = False
        self._sampling = Sampling([partial(self._read, part) for part in sampler.parts], self._scheduler.is_impatient)
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.Future[None]] = []
        self._finished: Callable[[TicketId], None] | None = None  # set iff a successor schedules

    # --------------------------------------------------------------------------------------------------------- events

    def post(self, event: Event) -> None:
        """Handle `event` now, or right after the one being handled. Never blocks, never raises for operational trouble.

        A bug in handling it costs the model that it is about: see `core.recovery`. Where even that fails, `event` is dropped, and
        the bug raised after the events that followed from it were handled.
        """
        if self._finished is not None:
            if type(event) is RequestFinished:
                self._finished(event.ticket)
            return
        self._events.append(event)
        if not self._handling:
            self._handle(event)

    def _handle(self, event: Event | None) -> None:
        """Everything that is posted; raises a mistake only in handling `event`."""
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
                recovered = self._recovered(following, began, error)
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
                    self._do(effect)
                except Exception as error:
                    log.exception("effect.failed", effect=repr(effect))
                    self._failed(effect, error)
            is_settled = self._is_settled(following, effects)
            if not is_settled:
                if settled:
                    settled = False
                    self.last_decision_s = took
                if isinstance(following, (WorkerReady, WorkerExited, LoadAsked)):
                    self._sampling.soon()
            self._tell(began, following, effects, is_settled=is_settled)
        self._handling = False
        if not settled:
            self._look_ahead()
        if self._watchers:
            self._wake_watchers()
        if mistake is not None:
            raise mistake

    def _recovered(self, event: Event, now: float, mistake: Exception) -> tuple[Event, list[Effect]] | None:
        """What was handled instead; None: nothing. Whatever happens, the events after it are handled."""
        try:
            recovered = self._recovery.recover(event, now, mistake)
        except Exception:
            log.critical("state.not_recovered", exc_info=True)
            return None
        if recovered is None:
            log.critical("event.dropped", happened=repr(event))
        return recovered

    def _tell(self, at: float, event: Event, effects: Sequence[Effect], *, is_settled: bool = False) -> None:
        """Everybody who looks. A mistake of theirs must not stop the engine."""
        try:
            for recording in tuple(self._recordings) if self._recordings else ():
                recording.add(at, event, effects)
            if is_settled:
                for notice in self.traffic:
                    notice()
                return
            self._waits.look(self._scheduler.state, at)
            happened = event.event or event if type(event) is Mishandled else event
            for observe in self.observers:
                observe(happened, effects)
        except Exception as error:
            log.critical("event.mishandled", happened=repr(event), exc_info=error)

    def _is_settled(self, event: Event, effects: list[Effect]) -> bool:
        """A request that was dispatched at once, or that ended while none waited, moves no deadline. This is the usual case."""
        if type(event) is RequestArrived:
            return len(effects) == 1 and type(effects[0]) is Dispatch
        return type(event) is RequestFinished and not effects and not self._scheduler.state.wanted

    def _look_ahead(self) -> None:
        """Set the timer for the next deadline; read memory soon if a load waits for it."""
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

    # -------------------------------------------------------------------------------------------------------- effects

    def _failed(self, effect: Effect, error: Exception) -> None:
        """It could not be carried out, which must not prevent the effects after it."""
        message = f"llmux failed to do it: {error!r}"
        if isinstance(effect, StartWorker):
            self._events.append(WorkerExited(effect.model, effect.generation, Crash(CrashClass.UNKNOWN, message)))
        elif isinstance(effect, StopWorker):
            self._events.append(WorkerUnkillable(effect.model, effect.generation, message))
        elif isinstance(effect, Dispatch):
            self._reject(Reject(effect.ticket, RejectCode.LOAD_FAILED, message))
            self._events.append(RequestFinished(effect.ticket))

    def _do(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatch(effect)
            case Decided(kind, model, reason):
                self.before_line()
                log.info("decision.made", kind=kind, model=model, reason=reason)
            case Reject():
                self._reject(effect)
            case StartWorker():
                self._fleet.start(effect, self.post)
            case StopWorker():
                if not self._fleet.stop(effect):  # its exit waits here, or was dropped
                    self._events.append(WorkerExited(effect.model, effect.generation))
            case CutRequest(ticket_id, reason):
                if (ticket := self._tickets.get(ticket_id)) is not None:
                    ticket.cut(reason)
            case AskClients(model, generation):
                self._events.append(ClientsRead(model, generation, held_up(self._tickets.values(), effect)))
            case Learn(model, device, mib=mib):
                self._keep(effect)
                log.info("footprint.learned", model=model, device=device, mib=mib)
            case LearnLoad():
                self._keep(effect)
            case Alert(code, message, device, model):
                self.before_line()
                log.warning("alert.raised", code=code, message=message, device=device, model=model)
            case _:
                assert_never(effect)

    def _keep(self, learned: Learn | LearnLoad) -> None:
        if self._learn is not None:
            self._tasks.add(task := asyncio.create_task(self._learn(learned)))
            task.add_done_callback(self._tasks.discard)

    def _dispatch(self, effect: Dispatch) -> None:
        ticket = self._tickets[effect.ticket]
        ticket.model, ticket.generation = effect.model, effect.generation
        ticket.upstream = self._fleet.upstream(effect.model, effect.generation)
        ticket.devices = self._scheduler.state.models[effect.model].devices
        ticket.admitted = self.clock()
        ticket.wake()

    def _reject(self, effect: Reject) -> None:
        ticket = self._tickets.get(effect.ticket)
        if ticket is not None:
            ticket.rejection = effect
            ticket.wake()

    # ------------------------------------------------------------------------------------------------------- requests

    def ask(self, ticket_id: TicketId, model: ModelId, demand: Demand = ANY, client: Client | None = None) -> Ticket:
        """Ask for a worker of `model`. Where one is ready and has room the ticket has its `upstream`; else await `admitted`.

        `client` is interrupted when the request is cut. `finish()` the ticket.
        """
        ticket = Ticket(ticket_id, model, self.clock(), client=client)
        self._tickets[ticket_id] = ticket
        try:
            self.post(RequestArrived(ticket_id, model, demand))
        except BaseException:
            self.finish(ticket)
            raise
        return ticket

    async def admitted(self, ticket: Ticket, waits: list[Wait], asked: str) -> None:
        """Wait until a worker takes the request. A wait is added to `waits`.

        Errors name the model as it was `asked` for; with them, or when it is cancelled, the ticket is finished. Raises
        NotFoundError or UnavailableError.
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
            raise HandedOverError if ticket.rejection is None else rejection(ticket.rejection, asked)

    def look(self, ticket_id: TicketId, model: ModelId) -> Ticket | None:
        """For a request that only looks at what a worker does: it waits for nobody, and nobody counts it. None: no worker answers.

        It isn't finished.
        """
        found = self._scheduler.state.models.get(model)
        for each in () if found is None else self._scheduler.state.replicas(found):
            if each.answering:
                now = self.clock()
                upstream = self._fleet.upstream(each.id, each.generation)
                return Ticket(ticket_id, each.id, now, each.generation, upstream, admitted=now)
        return None

    async def may_go_to_another(self, ticket: Ticket, within_s: float) -> bool:
        """Does it turn out, now or within that time, that the ticket's worker takes no more requests?

        False for a request that was cut: it would reload a model that was just unloaded.
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
                    await self._change()
                return ticket.cut_reason is None
        return False

    def finish(self, ticket: Ticket, tokens: int = 0, *, served: bool = True) -> None:
        """The request is over; see `RequestFinished`. Call this exactly once for every admitted ticket."""
        del self._tickets[ticket.id]
        ticket.client = None
        self.post(RequestFinished(ticket.id, tokens, served))

    # ----------------------------------------------------------------------------------------------------- recordings

    def recording(self) -> Recording:
        """What the scheduler gets and decides from now on. Raises UnavailableError when several are made already."""
        if len(self._recordings) >= MOST_RECORDINGS:
            raise UnavailableError(f"{len(self._recordings)} recordings are made already; end one.", retry_after_s=10.0)
        return Recording(self._scheduler, self.clock(), self._recordings)

    # ---------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to sample memory. Call it once, on the running loop."""
        self._sampling.start()

    def longest_drain_s(self) -> float:
        """How long running requests get at the most when all workers are stopped."""
        state = self._scheduler.state
        return max((state.admission.ordered_drain_s(model.spec) for model in state.models.values()), default=0.0)

    def freeze(self) -> None:
        """Handle nothing until `thaw` or `leave`: what is posted waits. Call it outside of events."""
        assert not self._handling
        self._handling = True

    def thaw(self) -> None:
        """Handle what was posted meanwhile, and all that follows. Harmless when it is not frozen."""
        self._handle(None)

    async def shutdown(self) -> None:
        """Drain and stop every worker; returns when each has ended or can't be killed. Does not wait for their memory."""
        self.post(ShutdownAsked())
        while any(
            found.has_worker and not found.exited and not found.stuck for found in self._scheduler.state.models.values()
        ):
            await self._change()
        self._rest()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sample(self) -> None:
        """Read all devices and workers once, and let the scheduler know."""
        await asyncio.gather(*(self._read(part) for part in self._sampler.parts))

    async def _read(self, sampler: MemorySampler) -> None:
        for reading in (await sampler.sample({**self._fleet.holders(), **self.measured_partners()})).by_device():
            try:
                self.post(reading)
            except Exception:  # no load may begin on what was read before
                self.post(replace(reading, devices=tuple(replace(each, stale=True) for each in reading.devices)))
                raise
