"""The read door: what may be seen of the scheduler's state, as frozen values that are made when somebody asks.

Nobody outside the engine touches the scheduler's own records. A status may be stale as soon as it was made; whatever
decides something reads within the engine's turn instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.core.device_ledger import Lease
from supervisor.core.ledger import DeviceTotals
from supervisor.core.placement import RELOAD_MIB_PER_S
from supervisor.core.state import ModelState, SchedulerState
from supervisor.core.types import Crash, DeviceId, Devices, DeviceSpec, Generation, ModelId, ModelSpec, WorkerState


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
    eta_s: float | None  # until it is loaded; None: it isn't loading
    load_s: float | None  # how long its last load took
    crash: Crash | None  # why it is in BACKOFF or FAILED
    is_replaced: bool  # a reload gave it another definition: its worker goes

    @property
    def id(self) -> ModelId:
        """Its configured name."""
        return self.spec.id

    @property
    def lease_mib(self) -> int | None:
        """What is leased on all of its devices together."""
        return sum(lease.mib for lease in self.leases) if self.leases else None

    @property
    def measured_mib(self) -> int | None:
        """What it was measured to take on all of its devices together."""
        measured = [lease.measured_mib for lease in self.leases if lease.measured_mib is not None]
        return sum(measured) if measured else None


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


def model_status(world: SchedulerState, record: ModelState, now: float) -> ModelStatus:
    """See ModelStatus."""
    leases = world.ledger.leases_of(record.holder)
    queued = world.queue.count(record.id)
    since_s = now - record.life.since
    return ModelStatus(
        spec=record.spec,
        state=record.state,
        reason=record.life.reason,
        since_s=since_s,
        answering=record.answering,
        has_worker=record.has_worker,
        generation=record.generation,
        devices=record.devices if record.has_worker else (),
        leases=leases,
        pinned=record.pinned,
        is_wanted=record.id in world.wanted or record.asked_at is not None or queued > 0,
        waits_for=record.claims if record.id in world.wanted else (),
        in_flight=len(record.in_flight),
        queued=queued,
        idle_s=now - record.last_used if record.has_worker and not record.in_flight else None,
        eta_s=_eta_s(record, leases, since_s),
        load_s=record.load_s,
        crash=record.crash,
        is_replaced=record.change is not None,
    )


def _eta_s(record: ModelState, leases: tuple[Lease, ...], since_s: float) -> float | None:
    """By the time the last load took; before the first one, by the size of the model."""
    if record.state is not WorkerState.STARTING:
        return None
    guess = max(1.0, sum(lease.mib for lease in leases) / RELOAD_MIB_PER_S)
    return max(0.0, (guess if record.load_s is None else record.load_s) - since_s)
