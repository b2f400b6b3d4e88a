"""The read door: the visible part of the scheduler's state, as frozen values made on demand.

Nobody outside the engine touches the scheduler's own records. A status may be stale as soon as it was made; code
that decides something reads within the engine's turn instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from supervisor.core.device_ledger import DeviceTotals, Lease
from supervisor.core.model_state import RELOAD_MIB_PER_S, ModelState
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
    WorkerState,
)
from supervisor.core.waiting import first_to_serve


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model and its worker. Seconds count from when the status was made."""

    spec: ModelSpec
    state: WorkerState
    reason: str  # of the last change of state
    since_s: float  # since then
    answering: bool  # its worker takes new requests
    has_worker: bool  # there is a process that holds memory, or may
    generation: Generation  # of the last worker
    devices: Devices  # where its worker is; empty without one
    leases: tuple[Lease, ...]
    pinned: bool
    is_wanted: bool  # somebody waits for it to be loaded
    waits_for: tuple[ModelId, ...]  # the models that have to go first
    in_flight: int
    queued: int
    idle_s: float | None  # None: it has no worker, or its worker has requests
    unload_s: float | None  # until it is unloaded if nobody uses it; None: not before its memory is needed
    held_s: float | None  # how long no model of equal or lower priority may still evict it; None: any may
    eta_s: float | None  # until it is loaded, or until the requests that it drains are cut; None: neither
    drain_s: float  # how long its requests may run on after an unload that isn't forced
    load_s: float | None  # how long its last load took
    crash: Crash | None  # why it is in BACKOFF or FAILED
    retry_s: float | None  # until it is tried again by itself after a crash; None: it isn't
    worker: ModelId  # the replica that the rest is about: the one that answers first
    replicas: tuple[ModelStatus, ...] = ()  # of the model: each that has a worker

    @property
    def id(self) -> ModelId:
        """Its configured name."""
        return self.spec.id

    @property
    def lease_mib(self) -> int | None:
        """What is leased on all of its devices together."""
        return _lease_mib(self.leases)

    @property
    def measured_mib(self) -> int | None:
        """What it was measured to take on all of its devices together."""
        return _measured_mib(self.leases)


class ModelFigures(NamedTuple):
    """What of a model costs little to know."""

    id: ModelId
    state: WorkerState
    queued: int
    in_flight: int
    crash: Crash | None  # why it is in BACKOFF or FAILED
    answering: bool
    is_wanted: bool


def model_figures(state: SchedulerState, model: ModelState, now: float) -> ModelFigures:
    """See ModelFigures, and `model_status`, which says the same of it."""
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


def mark(state: SchedulerState, model: ModelState, now: float) -> Mark:
    """Equals an earlier one iff the status is the same, but for the memory that it takes and for what changes with time alone."""
    if model.id not in state.groups:
        return _worker_mark(state, model, now)
    best = first_to_serve(state, model)
    return (best.id, *(_worker_mark(state, each, now) for each in state.replicas(model)))


def _worker_mark(state: SchedulerState, model: ModelState, now: float) -> Mark:
    """Made of the records that a status is made of: equal ones are nearly always the same, which costs next to nothing to see."""
    life, in_flight, queued = model.life, len(model.in_flight), state.queue.count(model.id)
    idle: Mark = ()
    if life.state is WorkerState.READY and not in_flight:
        idle = (state.stays_until(model, now), state.admission.held_until(model))
    about = (model.spec, life.state, life.reason, model.generation, model.worker, model.pinned, state.limits)
    waits = (_is_wanted(state, model, queued), state.claims(model.id))
    return (*about, in_flight, queued, *waits, model.load_s, model.crashes.last, model.crashes.retry_at, *idle)


def is_active(state: SchedulerState, model: ModelState) -> bool:
    """Has it a worker, or does anybody wait for its load or its worker? False for replicas and partners."""
    if model.partner is not None or model.spec.replica_of is not None:
        return False
    if model.asked_at is not None or model.id in state.wanted or (len(state.queue) and state.queue.count(model.id)):
        return True
    return model.has_worker if model.id not in state.groups else any(each.has_worker for each in state.replicas(model))


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """One model, or one replica, as far as its load is concerned."""

    state: WorkerState
    reason: str  # of the last change of state
    since_s: float  # since then
    generation: Generation  # of the last worker
    is_wanted: bool  # it isn't loaded, and somebody waits for it
    is_remote: bool
    load_s: float | None  # how long its last load took
    devices: Devices
    lease_mib: int | None
    measured_mib: int | None


@dataclass(frozen=True, slots=True)
class PartnerStatus:
    """A lease of somebody who isn't a worker of ours: waited for, held, or on its way back."""

    model: ModelStatus  # what stands for it in the scheduler
    partner: Partner
    expires_s: float | None  # until it ends without a heartbeat; None: it isn't held

    @property
    def id(self) -> ModelId:
        """Its name among the leases."""
        return self.model.id

    @property
    def is_held(self) -> bool:
        """May its holder use the memory?"""
        return self.model.state is WorkerState.READY


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: what it is, its totals, and the leases on it."""

    spec: DeviceSpec
    totals: DeviceTotals
    leases: tuple[Lease, ...]

    @property
    def id(self) -> DeviceId:
        """Its name in the configuration."""
        return self.spec.id


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """All requests that the engine knows."""

    waiting: int
    in_flight: int
    is_stopping: bool  # the daemon shuts down: nothing new is admitted
    most: int  # so many may wait
    most_per_model: int


@dataclass(frozen=True, slots=True)
class WaitFigures:
    """How long requests waited that were dispatched lately; None: none was."""

    mean_s: float | None
    p95_s: float | None

    @property
    def mean_ms(self) -> int | None:
        return None if self.mean_s is None else round(self.mean_s * 1000)

    @property
    def p95_ms(self) -> int | None:
        return None if self.p95_s is None else round(self.p95_s * 1000)


def model_status(state: SchedulerState, model: ModelState, now: float) -> ModelStatus:
    """See ModelStatus. Of a model with replicas: its best one, with what all of them hold and do."""
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
        unload_s=_idle_until(model, state.stays_until(model, now), now),
        held_s=_idle_until(model, state.admission.held_until(model), now),
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
    """See LoadStatus. The model must be none that stands for a partner."""
    is_away = model.state not in {WorkerState.STARTING, WorkerState.FAILED, *SERVES}
    leases = state.ledger.leases_of(model.holder)
    return LoadStatus(
        state=model.state,
        reason=model.life.reason,
        since_s=now - model.life.since,
        generation=model.generation,
        is_wanted=is_away
        and not (model.removed or state.shutting_down)
        and (model.wish is not None or state.waiting_for(model) > 0),
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
    """How long an idle worker has until then."""
    is_idle = model.state is WorkerState.READY and not model.in_flight
    return at - now if is_idle and now < at < math.inf else None


def _eta_s(model: ModelState, leases: tuple[Lease, ...], now: float) -> float | None:
    """Of a load by the time the last one took; before the first one, by the size of the model."""
    if model.drain is not None:
        return None if math.isinf(model.drain.until) else max(0.0, model.drain.until - now)
    if model.state is not WorkerState.STARTING:
        return None
    guess = max(1.0, sum(lease.mib for lease in leases) / RELOAD_MIB_PER_S)
    return max(0.0, (guess if model.load_s is None else model.load_s) - (now - model.life.since))


def partner_status(state: SchedulerState, model: ModelState, now: float) -> PartnerStatus:
    """See PartnerStatus. The model must stand for a partner."""
    partner = model.partner
    assert partner is not None
    is_held = model.state is WorkerState.READY and partner.until is not None
    expires_s = max(0.0, (partner.until or 0.0) - now) if is_held else None
    return PartnerStatus(model_status(state, model, now), partner, expires_s)
