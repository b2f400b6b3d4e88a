"""Read access to the scheduler's state, as frozen values made on demand.

Code outside the engine never uses the scheduler's own records, only the `ReadDoor`, the engine's base class. A status may be
out of date as soon as it was made; code that makes decisions must read within the engine's handling of an event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from supervisor.core.admission.limits import Account, Standing
from supervisor.core.admission.requests import limit_refusal
from supervisor.core.admission.waiting import Forecast, first_to_serve, forecast
from supervisor.core.decisions import DECISIONS, Decision, DecisionLog
from supervisor.core.effects import Reject
from supervisor.core.memory.device_ledger import DeviceTotals, Lease
from supervisor.core.model_state import RELOAD_MIB_PER_S, ModelState
from supervisor.core.planning.plans import Plan
from supervisor.core.planning.what_if import what_if
from supervisor.core.scheduler import Scheduler
from supervisor.core.state import SchedulerState
from supervisor.core.types import (
    SERVES,
    Crash,
    DeviceId,
    Devices,
    DeviceSpec,
    Generation,
    ModelId,
    ModelSpec,
    Partner,
    TicketId,
    WorkerState,
)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model and its worker. Seconds count from when the status was made."""

    spec: ModelSpec
    state: WorkerState
    reason: str  # of the last change of state
    since_s: float  # seconds since that change
    answering: bool  # its worker takes new requests
    has_worker: bool  # a process exists that holds memory, or may
    generation: Generation  # of the last worker
    devices: Devices  # where its worker is; empty without one
    leases: tuple[Lease, ...]
    pinned: bool
    is_wanted: bool  # a request or an operator waits for its load
    waits_for: tuple[ModelId, ...]  # the models to evict first
    in_flight: int
    queued: int
    idle_s: float | None  # None: it has no worker, or a busy one
    unload_s: float | None  # until it is unloaded if unused; None: not before its memory is needed
    protected_s: float | None  # remaining protection against models of equal or lower priority; None: not protected
    eta_s: float | None  # until it is loaded, or until a drain cuts its requests; None: neither
    drain_s: float  # how long its requests may continue after an unload that isn't forced
    load_s: float | None  # duration of the last load
    crash: Crash | None  # why it is in BACKOFF or FAILED
    retry_s: float | None  # until the automatic retry after a crash; None: no retry
    worker: ModelId  # the replica that these fields describe: the first to serve
    replicas: tuple[ModelStatus, ...] = ()  # the replicas of the model that have a worker

    @property
    def id(self) -> ModelId:
        """The model's configured name."""
        return self.spec.id

    @property
    def lease_mib(self) -> int | None:
        """The MiB leased on all of its devices together."""
        return _lease_mib(self.leases)

    @property
    def measured_mib(self) -> int | None:
        """The MiB measured on all of its devices together."""
        return _measured_mib(self.leases)


class ModelFigures(NamedTuple):
    """The fields of a `ModelStatus` that are cheap to compute."""

    id: ModelId
    state: WorkerState
    queued: int
    in_flight: int
    crash: Crash | None  # why it is in BACKOFF or FAILED
    answering: bool
    is_wanted: bool


def model_figures(state: SchedulerState, model: ModelState, now: float) -> ModelFigures:
    """The figures of one model; equal to the same fields of its `model_status`."""
    if model.id in state.groups or model.spec.replica_of is not None:
        known = model_status(state, model, now)
        figures = (known.state, known.queued, known.in_flight, known.crash, known.answering, known.is_wanted)
        return ModelFigures(known.id, *figures)
    queued = state.queue.count(model.id)
    return ModelFigures(
        model.id,
        model.state,
        queued,
        len(model.in_flight),
        model.crash,
        model.answering,
        _is_wanted(state, model, queued),
    )


Mark = tuple[object, ...]
"""Represents a model's status in comparisons: see `mark`."""


def mark(state: SchedulerState, model: ModelState, now: float) -> Mark:
    """A value that changes when the model's status does. It ignores the measured memory and the passing of time."""
    if model.id not in state.groups:
        return _worker_mark(state, model, now)
    best = first_to_serve(state, model)
    return (best.id, *(_worker_mark(state, each, now) for each in state.replicas(model)))


def _worker_mark(state: SchedulerState, model: ModelState, now: float) -> Mark:
    """One worker's mark. It holds the records behind a status, mostly unchanged objects, so a comparison is cheap."""
    life, in_flight, queued = model.life, len(model.in_flight), state.queue.count(model.id)
    idle: Mark = ()
    if life.state is WorkerState.READY and not in_flight:
        idle = (state.keep_loaded_until(model, now), state.admission.protected_until(model))
    about = (model.spec, life.state, life.reason, model.generation, model.worker, model.pinned, state.limits)
    waits = (_is_wanted(state, model, queued), state.claims(model.id))
    return (*about, in_flight, queued, *waits, model.load_s, model.crashes.last, model.crashes.retry_at, *idle)


def is_active(state: SchedulerState, model: ModelState) -> bool:
    """Whether the model has a worker, or a request or operator waits for one. False for replicas and partners."""
    if model.partner is not None or model.spec.replica_of is not None:
        return False
    if model.asked_at is not None or model.id in state.wanted or (len(state.queue) and state.queue.count(model.id)):
        return True
    return model.has_worker if model.id not in state.groups else any(each.has_worker for each in state.replicas(model))


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """The load state of one model or replica: loaded, loading or wanted, and its devices."""

    state: WorkerState
    reason: str  # of the last change of state
    since_s: float  # seconds since that change
    generation: Generation  # of the last worker
    is_wanted: bool  # it isn't loaded, and a request or an operator waits for it
    is_remote: bool
    load_s: float | None  # duration of the last load
    devices: Devices
    lease_mib: int | None
    measured_mib: int | None


@dataclass(frozen=True, slots=True)
class PartnerStatus:
    """A partner's lease, for a process that isn't our worker: requested, granted, or being returned."""

    model: ModelStatus  # the model that represents the partner in the scheduler
    partner: Partner
    expires_s: float | None  # until it ends without a heartbeat; None: not granted

    @property
    def id(self) -> ModelId:
        """The name of the lease."""
        return self.model.id

    @property
    def is_granted(self) -> bool:
        """Whether the holder may use the memory."""
        return self.model.state is WorkerState.READY


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: its specification, its totals, and its leases."""

    spec: DeviceSpec
    totals: DeviceTotals
    leases: tuple[Lease, ...]

    @property
    def id(self) -> DeviceId:
        """The device's name in the configuration."""
        return self.spec.id


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The counts of all requests, and the limits of the queue."""

    waiting: int
    in_flight: int
    is_stopping: bool  # the daemon shuts down and admits no requests
    most: int  # maximum of waiting requests
    most_per_model: int


@dataclass(frozen=True, slots=True)
class WaitFigures:
    """How long the recently dispatched requests had waited; None: no request was dispatched recently."""

    mean_s: float | None
    p95_s: float | None

    @property
    def mean_ms(self) -> int | None:
        return None if self.mean_s is None else round(self.mean_s * 1000)

    @property
    def p95_ms(self) -> int | None:
        return None if self.p95_s is None else round(self.p95_s * 1000)


def model_status(state: SchedulerState, model: ModelState, now: float) -> ModelStatus:
    """The status of a model. With several replicas: the status of the best one, with memory and requests of all."""
    replicas = state.replicas(model)
    if len(replicas) == 1 or model.spec.replica_of is not None:
        status = _worker_status(state, model, now)
        return replace(status, replicas=(status,)) if status.has_worker else status
    best = first_to_serve(state, model)
    if not best.serves and not best.has_worker:
        best = next((each for each in replicas if each.has_worker), best)
    known = tuple(_worker_status(state, each, now) for each in replicas)
    status = next(each for each in known if each.id == best.id)
    with_worker = tuple(each for each in known if each.has_worker)
    in_flight = sum(each.in_flight for each in known)
    return replace(
        status,
        spec=model.spec,
        has_worker=bool(with_worker),
        devices=tuple(dict.fromkeys(device for each in with_worker for device in each.devices)),
        leases=tuple(lease for each in with_worker for lease in each.leases),
        is_wanted=known[0].is_wanted,
        waits_for=known[0].waits_for,
        in_flight=in_flight,
        queued=known[0].queued,
        idle_s=None if in_flight else min((each.idle_s for each in known if each.idle_s is not None), default=None),
        replicas=with_worker,
    )


def _worker_status(state: SchedulerState, model: ModelState, now: float) -> ModelStatus:
    leases = state.ledger.leases_of(model.holder)
    queued = state.queue.count(model.id)
    since_s = now - model.life.since
    return ModelStatus(
        spec=model.spec,
        state=model.state,
        reason=model.life.reason,
        since_s=since_s,
        answering=model.answering,
        has_worker=model.has_worker,
        generation=model.generation,
        devices=model.devices if model.has_worker else (),
        leases=leases,
        pinned=model.pinned,
        is_wanted=_is_wanted(state, model, queued),
        waits_for=state.claims(model.id),
        in_flight=len(model.in_flight),
        queued=queued,
        idle_s=now - model.last_used if model.has_worker and not model.in_flight else None,
        unload_s=_idle_until(model, state.keep_loaded_until(model, now), now),
        protected_s=_idle_until(model, state.admission.protected_until(model), now),
        eta_s=_eta_s(model, leases, now),
        drain_s=state.admission.ordered_drain_s(model.spec),
        load_s=model.load_s,
        crash=model.crash,
        retry_s=None if model.crashes.retry_at is None else max(0.0, model.crashes.retry_at - now),
        worker=model.id,
    )


def _is_wanted(state: SchedulerState, model: ModelState, queued: int) -> bool:
    return model.id in state.wanted or model.asked_at is not None or queued > 0


def load_status(state: SchedulerState, model: ModelState, now: float) -> LoadStatus:
    """The load status of a model or a replica. Not for models that represent partners."""
    is_away = model.state not in {WorkerState.STARTING, WorkerState.FAILED, *SERVES}
    leases = state.ledger.leases_of(model.holder)
    return LoadStatus(
        state=model.state,
        reason=model.life.reason,
        since_s=now - model.life.since,
        generation=model.generation,
        is_wanted=is_away
        and not (model.removed or state.shutting_down)
        and (model.load_intent is not None or state.waiting_for(model) > 0),
        is_remote=model.spec.remote,
        load_s=model.load_s,
        devices=model.devices if model.has_worker else (),
        lease_mib=_lease_mib(leases),
        measured_mib=_measured_mib(leases),
    )


def _lease_mib(leases: tuple[Lease, ...]) -> int | None:
    return sum(lease.mib for lease in leases) if leases else None


def _measured_mib(leases: tuple[Lease, ...]) -> int | None:
    measured = [lease.measured_mib for lease in leases if lease.measured_mib is not None]
    return sum(measured) if measured else None


def _idle_until(model: ModelState, at: float, now: float) -> float | None:
    """Seconds until `at` for an idle worker; None for a busy one, and if `at` is past or infinite."""
    is_idle = model.state is WorkerState.READY and not model.in_flight
    return at - now if is_idle and now < at < math.inf else None


def _eta_s(model: ModelState, leases: tuple[Lease, ...], now: float) -> float | None:
    """Seconds until a drain or load ends: a load by the duration of the last one, else by the model's size."""
    if model.drain is not None:
        return None if math.isinf(model.drain.until) else max(0.0, model.drain.until - now)
    if model.state is not WorkerState.STARTING:
        return None
    guess = max(1.0, sum(lease.mib for lease in leases) / RELOAD_MIB_PER_S)
    return max(0.0, (guess if model.load_s is None else model.load_s) - (now - model.life.since))


def partner_status(state: SchedulerState, model: ModelState, now: float) -> PartnerStatus:
    """The status of a partner's lease. The model must represent a partner."""
    partner = model.partner
    assert partner is not None
    is_granted = model.state is WorkerState.READY and partner.until is not None
    expires_s = max(0.0, (partner.until or 0.0) - now) if is_granted else None
    return PartnerStatus(model_status(state, model, now), partner, expires_s)


class ReadDoor:
    """Answers all queries of the rest of the daemon about the scheduler. Changes nothing.

    An answer may soon be out of date.
    """

    def __init__(self, scheduler: Scheduler, decisions: DecisionLog, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._decisions = decisions
        self.clock = clock

    def model(self, model: ModelId) -> ModelStatus | None:
        """The model's current status; None if it is not configured."""
        state = self._scheduler.state
        found = state.models.get(model)
        return None if found is None else model_status(state, found, self.clock())

    def load_status(self, model: ModelId) -> LoadStatus | None:
        """The load of a model or replica; None if it isn't configured."""
        state = self._scheduler.state
        found = state.models.get(model)
        return None if found is None or found.partner is not None else load_status(state, found, self.clock())

    def models(self) -> tuple[ModelStatus, ...]:
        """Every model, in the order of the configuration; each with its replicas."""
        state, now = self._scheduler.state, self.clock()
        return tuple(model_status(state, found, now) for found in _configured_models(state))

    def active(self) -> tuple[ModelStatus, ...]:
        """Every model that has a worker, or is waited for. The cost for all other models is negligible."""
        state, now = self._scheduler.state, self.clock()
        return tuple(model_status(state, found, now) for found in state.models.values() if is_active(state, found))

    def answering(self) -> list[ModelId]:
        """The models that have a worker which takes new requests."""
        models = self._scheduler.state.models.values()
        return [*dict.fromkeys(found.queue_key for found in models if found.answering and found.partner is None)]

    def figures(self) -> list[ModelFigures]:
        """The figures of every model, in the order of `models`."""
        state, now = self._scheduler.state, self.clock()
        return [model_figures(state, found, now) for found in _configured_models(state)]

    def figures_of(self, model: ModelId) -> ModelFigures | None:
        """The figures of one model; None if it is not configured."""
        state = self._scheduler.state
        found = state.models.get(model)
        return None if found is None else model_figures(state, found, self.clock())

    def marks(self) -> dict[ModelId, Mark]:
        """The mark of every model: compare marks later to find changed statuses."""
        state, now = self._scheduler.state, self.clock()
        return {found.id: mark(state, found, now) for found in _configured_models(state)}

    def partners(self) -> tuple[PartnerStatus, ...]:
        """The leases of partners, oldest first, including requested ones."""
        state, now = self._scheduler.state, self.clock()
        return tuple(partner_status(state, found, now) for found in state.models.values() if found.partner is not None)

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Every configured device, by id."""
        ledger = self._scheduler.state.ledger
        return tuple(
            DeviceStatus(device, ledger.totals(device.id), ledger.leases_on(device.id)) for device in ledger.devices()
        )

    def device_specs(self) -> tuple[DeviceSpec, ...]:
        """The specifications of the configured devices, by id."""
        return self._scheduler.state.ledger.devices()

    def pinned(self) -> list[ModelSpec]:
        """Every model that is pinned now, by its configuration or by an operator."""
        pinned = (found.spec for found in _configured_models(self._scheduler.state) if found.pinned)
        return [spec if spec.pin else replace(spec, pin=True) for spec in pinned]

    def forecast(self, model: ModelId) -> Forecast:
        """How long a request that is queued for the model now will wait."""
        state = self._scheduler.state
        found = state.models.get(model)
        return Forecast(None, "") if found is None else forecast(state, found, self.clock())

    def what_if(self, spec: ModelSpec) -> Plan:
        """The plan for loading this model now: the models to evict, and the devices for it."""
        return what_if(self._scheduler.state, self.clock(), spec)

    def queue(self) -> QueueStatus:
        """The numbers of waiting and running requests, and the limits of the queue."""
        state = self._scheduler.state
        limits, waiting, running = state.limits, len(state.queue), len(state.tickets)
        return QueueStatus(waiting, running, state.shutting_down, limits.queue_total, limits.queue_per_model)

    def waits(self, model: ModelId | None = None) -> WaitFigures:
        """How long the recently dispatched requests had waited: of one model, or of all. Slower than the other queries."""
        recent, now = self._scheduler.state.queue.recent, self.clock()
        return WaitFigures(recent.mean_s(now, model), recent.p95_s(now, model))

    def standings(self, accounts: Sequence[Account]) -> list[Standing]:
        """The remaining amount of each limit of these accounts."""
        return self._scheduler.state.admission.accounts.standings(accounts, self.clock())

    def limit_rejection(self, ticket: TicketId, accounts: Sequence[Account]) -> Reject | None:
        """The rejection that a request of these accounts would get now; None: no limit is reached."""
        reached = self._scheduler.state.admission.accounts.reached(accounts, self.clock())
        return None if reached is None else limit_refusal(ticket, reached)

    def limited(self) -> list[Standing]:
        """The standing of every partly used limit, of all accounts."""
        return self._scheduler.state.admission.accounts.used_limits(self.clock())

    def decisions(self, model: ModelId | None = None, *, limit: int = DECISIONS) -> list[Decision]:
        """The last decisions, oldest first: about one model, or all."""
        return self._decisions.last(model, limit=limit)

    def decisions_since(self, seq: int) -> list[Decision]:
        """All kept decisions after number `seq`, oldest first."""
        return self._decisions.since(seq)


def _configured_models(state: SchedulerState) -> Iterator[ModelState]:
    """The configured models, without further replicas and partners."""
    return (found for found in state.models.values() if found.partner is None and found.spec.replica_of is None)
