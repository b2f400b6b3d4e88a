"""The scheduler's state: one `ModelState` per configured model, the ledger, the queue, the waiters, the timers.

One `Scheduler` owns the whole state and changes it only inside `handle()`. Each such call is a `Step`: the time, and the
effects collected so far.

`SchedulerState.check()` asserts that the state is legal. Tests run it after every event; the daemon never does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from supervisor.core.admission.admission import BACKGROUND_RANK, AdmissionPolicy
from supervisor.core.admission.queue import AdmissionQueue
from supervisor.core.admission.waiters import Waiters
from supervisor.core.effects import Decided, Effect
from supervisor.core.memory.ledger import Ledger
from supervisor.core.model_state import NEVER_STARTED, ModelState
from supervisor.core.types import Generation, Limits, ModelId, TicketId, WorkerState


class MishandledError(AssertionError):
    """Handling an event raised, which is a bug; the state is half changed. `about`: the model at fault, if known."""

    def __init__(self, message: str, about: ModelId | None) -> None:
        super().__init__(message)
        self.about = about


@dataclass(slots=True)
class Step:
    """One call of `Scheduler.handle`."""

    now: float
    effects: list[Effect] = field(default_factory=list)
    about: ModelId | None = None  # the model that is being handled, for `MishandledError`

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def decide(self, kind: str, model_id: ModelId | None, reason: str) -> None:
        self.effects.append(Decided(kind, model_id, reason))


@dataclass(slots=True)
class SchedulerState:
    """The whole state on which the scheduler's decisions depend."""

    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    ledger: Ledger = field(default_factory=Ledger)
    queue: AdmissionQueue = field(init=False)
    models: dict[ModelId, ModelState] = field(default_factory=dict)
    tickets: dict[TicketId, ModelId] = field(default_factory=dict)  # of dispatched requests
    wanted: Waiters = field(default_factory=Waiters)  # models to be loaded as soon as there is room
    timers: list[tuple[float, ModelId]] = field(default_factory=list)  # a heap
    armed: set[tuple[float, ModelId]] = field(
        default_factory=set
    )  # the set of these timers: plans arm the same timer repeatedly
    groups: dict[ModelId, tuple[ModelId, ...]] = field(
        default_factory=dict
    )  # model with several replicas → all its replicas, the primary first
    last_forgotten: Generation = NEVER_STARTED  # the latest generation of all forgotten models
    shutting_down: bool = False
    handing_over: bool = False  # during a handover: no plans are made

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(self.admission)

    @property
    def limits(self) -> Limits:
        return self.admission.limits

    def use_policy(self, admission: AdmissionPolicy) -> None:
        """Use this policy from now on."""
        if admission is not self.admission:
            self.admission = admission
            self.queue.use_policy(admission)

    def wake(self, at: float, model_id: ModelId) -> None:
        """Set a timer to check the model at `at`, unless `at` is infinite. An unnecessary timer is harmless."""
        if at < math.inf and (at, model_id) not in self.armed:
            self.armed.add((at, model_id))
            heapq.heappush(self.timers, (at, model_id))

    def wake_by(self, at: float, model: ModelState, now: float) -> None:
        """Set a timer to check the model at `at` or earlier: for times that move with each use of the model."""
        if not now < model.looked_at <= at:
            model.looked_at = at
            self.wake(at, model.id)

    def next_wake(self) -> float:
        """When the next timer fires; infinity when none does."""
        return self.timers[0][0] if self.timers else math.inf

    def due(self, now: float) -> list[ModelId]:
        """Take out the timers that are due. Returns their models, each once."""
        if self.next_wake() > now:
            return []
        due: dict[ModelId, None] = {}
        while self.next_wake() <= now:
            timer = heapq.heappop(self.timers)
            self.armed.remove(timer)
            due[timer[1]] = None
        return list(due)

    def current(self, model_id: ModelId, generation: Generation) -> ModelState | None:
        """The model of a report; None if the report is about an older worker or a forgotten model."""
        model = self.models.get(model_id)
        return model if model is not None and model.generation == generation and model.has_worker else None

    def replicas(self, model: ModelState) -> list[ModelState]:
        """All replicas of its model, the primary first."""
        names = self.groups.get(model.queue_key)
        return [model] if names is None else [self.models[name] for name in names if name in self.models]

    def takes_next(self, model: ModelState) -> bool:
        """Whether a queued request can go to this worker now."""
        head = self.queue.peek(model.queue_key) if model.answering else None
        return head is not None and not self.admission.is_full(model, head.demand)

    def is_served_elsewhere(self, model: ModelState) -> bool:
        """Whether another replica takes the requests of its model."""
        return model.queue_key in self.groups and any(each.serves for each in self.replicas(model) if each is not model)

    def primary_replica(self, model: ModelState) -> ModelState:
        """The replica to load for requests when none is loaded: the first that hasn't failed."""
        if model.queue_key not in self.groups:
            return model
        replicas = self.replicas(model)
        usable = (each for each in replicas if not each.has_failed and not each.stuck)
        return next(usable, replicas[0])

    def waiting_for(self, model: ModelState) -> int:
        """How many queued requests only the load of this replica can serve."""
        if model.queue_key in self.groups:
            if self.primary_replica(model) is not model or self.is_served_elsewhere(model):
                return 0
        elif model.queue_key != model.id:  # a replica that is no longer configured
            return 0
        return self.queue.count(model.queue_key)

    def keep_loaded_until(self, model: ModelState, now: float) -> float:
        """Until when an idle worker stays loaded. All replicas of a model except `extra` ones are unloaded together."""
        if model.queue_key not in self.groups or model.spec.extra:
            return self.admission.keep_loaded_until(model)
        until = self.admission.keep_loaded_until(model)
        for each in self.replicas(model):
            if each.has_worker and not each.spec.extra:
                in_use_until = now + (each.spec.keep_alive_s or 0.0) if each.in_flight else now
                until = max(until, in_use_until, self.admission.keep_loaded_until(each))
        return until

    def is_requested(self, model: ModelState) -> bool:
        """Whether an operator or a request wants the model."""
        return model.asked_at is not None or self.waiting_for(model) > 0

    def is_wanted(self, model: ModelState) -> bool:
        """Whether the model is unloaded, may be loaded, and somebody wants it."""
        return (
            model.life.state is WorkerState.STOPPED
            and not model.removed
            and not self.shutting_down
            and (model.load_intent is not None or self.waiting_for(model) > 0)
        )

    def update_wanted(self, model: ModelState) -> None:
        """Add the model to `wanted` or remove it, depending on its current state."""
        if self.is_wanted(model):
            is_requested = self.is_requested(model)
            background = (*BACKGROUND_RANK, -model.spec.priority)
            rank = self.admission.rank_model(model, self.queue) if is_requested else background
            lost = self.wanted.put(model.id, rank)
        else:
            lost = self.wanted.remove(model.id)
        for device in lost:
            self.ledger.mark_changed(device)

    def touch(self, model: ModelState) -> None:
        """The model has changed: replan it, and all waiters for the memory that it holds."""
        for device in model.devices:
            self.ledger.mark_changed(device)
        self.wanted.plan_again(model.id)

    def claims(self, model_id: ModelId) -> tuple[ModelId, ...]:
        """The models to evict for this one; empty unless it is wanted."""
        place = self.wanted.place(model_id)
        return () if place is None else place.claims

    def check(self) -> None:
        """Assert that the whole state is legal; the error contains the worker's history."""
        self.ledger.check()
        self.queue.check()
        self.admission.accounts.check()
        self.admission.shares.check()
        assert self.admission.shares.running() == self.tickets.keys()
        assert self.tickets == {ticket: m.id for m in self.models.values() for ticket in m.in_flight}
        assert len(self.timers) == len(self.armed) <= 20 * len(self.models) + 20, "timers pile up"
        self.wanted.check()
        assert set(self.wanted) <= self.models.keys()
        for model_id, generation in {lease.holder for lease in self.ledger.leases()}:
            assert generation <= self.models[model_id].generation, f"{model_id}: a lease of a worker that never started"
        for model in self.models.values():
            for holds, law in (*model.check(), *self._check_model(model)):
                assert holds, f"{model.id} is {model.state}: {law}; {model}; story:\n{model.life.history_text()}"

    def _check_model(self, model: ModelState) -> Iterator[tuple[bool, str]]:
        state, queued = model.state, self.waiting_for(model)
        if state is WorkerState.READY:
            yield not self.takes_next(model), "a queued request could be served"
        if model.has_failed or model.removed or model.stuck or self.shutting_down:
            yield not queued, "a request waits for what can't come"
        yield (model.id in self.wanted) == self.is_wanted(model), "wanted iff it is to be loaded"
        yield not (self.claims(model.id) and self.handing_over), "claims although a successor plans"
        if model.claimed_by is not None:
            yield model.id in self.claims(model.claimed_by), "claimed by a model that does not wait for it"
        drain = model.drain
        drained_at, look_at = (None, None) if drain is None else (drain.until, drain.look_at)
        is_default = model.id in self.admission.policy.default_models
        yield (model.returns_at is not None) == is_default, "a time to come back iff it is a default model"
        for at in (model.crashes.retry_at, drained_at, look_at, model.keep_alive_at, model.returns_at):
            yield at in {None, math.inf} or (at, model.id) in self.armed, "a time that no timer waits for"
        if model.worker is not None and not model.exited:
            leased = tuple(lease.device for lease in self.ledger.leases_of(model.holder))
            yield leased == (() if model.spec.remote else model.devices), "a lease on each of its devices"
        elif state is not WorkerState.STOPPING and model.removed:
            yield self.ledger.holds_any(model.id), "removed, and nothing of it is left"
