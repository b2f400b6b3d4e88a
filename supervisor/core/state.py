"""What the scheduler remembers: one `Record` per configured model, the ledger, the queue, the timers.

All of it is owned by one `Scheduler` and changed only inside its `handle()`. A `Turn` is one such call: the time, and
the effects it collects.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from supervisor.core.device_ledger import Holder
from supervisor.core.device_sets import need_mib, usable_mib
from supervisor.core.ledger import Ledger
from supervisor.core.lifecycle import HAS_WORKER, Lifecycle, Step
from supervisor.core.queue import AdmissionQueue
from supervisor.core.types import (
    Crash,
    Decided,
    DeviceId,
    Devices,
    DeviceSpec,
    Dispatch,
    Effect,
    Footprint,
    FootprintSource,
    Generation,
    Limits,
    ModelId,
    ModelSpec,
    Policy,
    Reject,
    RejectCode,
    State,
    StopCause,
    StopWorker,
    TicketId,
)

OUT_OF_MEMORY_EXTRA = 1.25
"""Factor on the footprint for the one retry after a start that ran out of memory."""

NEVER_STARTED = Generation(0)


@dataclass(slots=True)
class Turn:
    """One call of `Scheduler.handle`."""

    now: float
    effects: list[Effect] = field(default_factory=list)

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def decide(self, kind: str, model: ModelId | None, reason: str) -> None:
        self.effects.append(Decided(kind, model, reason))


@dataclass(slots=True)
class Record:
    """One model: its worker's life, its requests, and who wants or claims it."""

    spec: ModelSpec
    life: Lifecycle
    generation: Generation = NEVER_STARTED
    devices: Devices = ()  # where its worker is
    answering: bool = False  # readiness: False holds new requests back
    in_flight: dict[TicketId, None] = field(default_factory=dict)
    last_used: float = 0.0
    ready_at: float = 0.0
    turn_ended: float = float("-inf")  # when it was last stopped
    load_s: float | None = None  # how long the last successful load took
    asked_at: float | None = None  # an operator or preload wants it, since then
    restore: bool = False  # it was loaded, or is to be preloaded: load it if nothing has to go for it
    claimed_by: ModelId | None = None  # it must go for this model
    claims: tuple[ModelId, ...] = ()  # these must go for this one
    stop_reason: str | None = None  # why it is drained, when not for a claim
    stop_cause: StopCause = StopCause.ROOM  # the same in one word
    drain_until: float | None = None
    pin: bool | None = None  # an operator's word; None: as configured
    next_spec: ModelSpec | None = None  # a reload changed how it runs; takes effect when this worker is gone
    retired: bool = False  # no longer configured; forgotten when its worker is gone
    stuck: bool = False  # its process survived SIGKILL
    exited: bool = False  # its tree is gone, its memory may not be back yet
    crashes: deque[float] = field(default_factory=deque)  # when, those within the crash window
    crash: Crash | None = None  # why it is in BACKOFF or FAILED
    retry_at: float = 0.0
    keep_alive_at: float | None = None  # when to see whether it has been idle for too long
    oom_retried: bool = False
    last_plan: str = ""  # kind and reason of the last plan, so that the journal has each only once

    @property
    def id(self) -> ModelId:
        return self.spec.id

    @property
    def state(self) -> State:
        return self.life.state

    @property
    def pinned(self) -> bool:
        """Is it never to be evicted?"""
        return self.spec.pin if self.pin is None else self.pin

    @property
    def has_worker(self) -> bool:
        return self.life.state in HAS_WORKER

    @property
    def holder(self) -> Holder:
        return (self.spec.id, self.generation)

    def need_on(self, place: Sequence[DeviceSpec]) -> int:
        """What to lease on each of these; more on the one retry after it ran out of memory, as far as there is more."""
        mib = need_mib(self.spec, place)
        return max(mib, min(int(mib * OUT_OF_MEMORY_EXTRA), usable_mib(place))) if self.oom_retried else mib

    def learn(self, device: DeviceId, mib: int) -> None:
        """Use `mib` for the next load on `device`."""
        learned = {**self.spec.learned, device: Footprint(mib, FootprintSource.LEARNED, f"measured on {device}")}
        self.spec = replace(self.spec, learned=learned)


@dataclass(slots=True)
class World:
    """Everything the scheduler decides on."""

    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    ledger: Ledger = field(default_factory=Ledger)
    queue: AdmissionQueue = field(default_factory=AdmissionQueue)
    records: dict[ModelId, Record] = field(default_factory=dict)
    tickets: dict[TicketId, ModelId] = field(default_factory=dict)  # dispatched ones
    wanted: dict[ModelId, None] = field(default_factory=dict)  # models that somebody wants loaded and that aren't
    timers: list[tuple[float, ModelId]] = field(default_factory=list)  # a heap
    armed: set[tuple[float, ModelId]] = field(
        default_factory=set
    )  # what is in it: plans ask for the same again and again
    last_forgotten: Generation = NEVER_STARTED  # no generation of a forgotten model was later
    shutting_down: bool = False

    def wake(self, at: float, model: ModelId) -> None:
        """Look at `model` again at `at`. Waking too often is harmless."""
        if (at, model) not in self.armed:
            self.armed.add((at, model))
            heapq.heappush(self.timers, (at, model))

    def next_wake(self) -> float:
        """When the next timer comes; infinity when none does."""
        return self.timers[0][0] if self.timers else math.inf

    def due(self, now: float) -> list[ModelId]:
        """The models whose timers have come, each once."""
        if self.next_wake() > now:
            return []
        due: dict[ModelId, None] = {}
        while self.next_wake() <= now:
            timer = heapq.heappop(self.timers)
            self.armed.remove(timer)
            due[timer[1]] = None
        return list(due)

    def keep_alive(self, record: Record) -> None:
        """See to it that an idle worker is looked at when its keep-alive is over. One timer at a time."""
        keep_alive_s = record.spec.keep_alive_s
        if keep_alive_s is None or record.state is not State.READY or record.in_flight:
            return
        at = record.last_used + keep_alive_s
        if record.keep_alive_at is None or at < record.keep_alive_at:
            record.keep_alive_at = at
            self.wake(at, record.id)

    def forget(self, record: Record) -> None:
        """Drop the record; should the model come back, its generations go on from where no message can be about."""
        del self.records[record.id]
        self.last_forgotten = max(self.last_forgotten, record.generation)

    def current(self, model: ModelId, generation: Generation) -> Record | None:
        """The record, unless the message is about an older worker or a forgotten model."""
        record = self.records.get(model)
        return record if record is not None and record.generation == generation and record.has_worker else None

    def dispatch(self, turn: Turn, record: Record) -> None:
        """Send queued requests to the worker, as many as it takes and the state allows."""
        while (
            record.state is State.READY
            and record.answering
            and not self.is_full(record)
            and (waiting := self.queue.pop(record.id)) is not None
        ):
            self.assign(turn, record, waiting.ticket)

    def assign(self, turn: Turn, record: Record, ticket: TicketId) -> None:
        """Give the worker this ticket now."""
        record.in_flight[ticket] = None
        record.last_used = turn.now
        self.tickets[ticket] = record.id
        turn.emit(Dispatch(ticket, record.id, record.generation))

    @staticmethod
    def is_full(record: Record) -> bool:
        """Has the worker all the requests it gets at once?"""
        return 0 < record.spec.target_inflight <= len(record.in_flight)

    def stop(self, turn: Turn, record: Record, cause: StopCause, reason: str, *, force: bool = False) -> None:
        """Signals go out; its memory stays leased until the tree is gone and the device shows it back."""
        record.life.step(Step.STOP, turn.now, reason)
        record.answering = False
        record.drain_until = record.keep_alive_at = None
        record.turn_ended = turn.now
        if not record.spec.remote:
            self.ledger.stopping(record.holder)
        turn.emit(StopWorker(record.id, record.generation, cause, reason, force))

    def resume(self, turn: Turn, record: Record, reason: str) -> None:
        """A draining worker stays after all. Whoever asked for the model meanwhile has it."""
        record.life.step(Step.RESUME, turn.now, reason)
        self.stays(turn, record)

    def stays(self, turn: Turn, record: Record) -> None:
        """It is ready and nobody is after its place any more."""
        record.asked_at = None
        record.restore = False
        self.dispatch(turn, record)
        self.keep_alive(record)

    def want(self, record: Record) -> None:
        """Keep `wanted` true for this model: it isn't loaded, may be, and somebody waits for it."""
        if (
            record.state is State.STOPPED
            and not record.retired
            and not record.stuck
            and not self.shutting_down
            and (record.asked_at is not None or record.restore or self.queue.count(record.id) > 0)
        ):
            self.wanted[record.id] = None
        else:
            self.wanted.pop(record.id, None)

    def reject_all(
        self,
        turn: Turn,
        record: Record,
        code: RejectCode,
        message: str,
        *,
        retry_after_s: float | None = None,
        detail: tuple[str, ...] = (),
    ) -> None:
        """Every queued request of the model gets this answer; nobody waits for it any more."""
        for waiting in self.queue.clear(record.id):
            turn.emit(Reject(waiting.ticket, code, message, retry_after_s, detail))
        record.asked_at = None
        record.restore = False
