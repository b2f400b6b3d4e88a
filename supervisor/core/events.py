"""The events that the scheduler handles: everything that happens outside the core. All classes are frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from supervisor.core.demand import DEFAULT_DEMAND, NORMAL, Demand
from supervisor.core.types import (
    Crash,
    DeviceId,
    Devices,
    DeviceSpec,
    Generation,
    Limits,
    ModelId,
    ModelSpec,
    Partner,
    Parts,
    Policy,
    TicketId,
)


@dataclass(frozen=True, slots=True)
class Configured:
    """The whole configuration, at boot and after every reload. The scheduler stops and forgets models that are missing in it."""

    models: tuple[ModelSpec, ...]
    devices: tuple[DeviceSpec, ...]
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client wants `model`."""

    ticket: TicketId
    model: ModelId
    demand: Demand = DEFAULT_DEMAND


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A dispatched or queued request has ended, for any reason (its client may have disconnected)."""

    ticket: TicketId
    tokens: int = 0  # as its answer reports, if an account counts tokens
    served: bool = True  # False: no worker got the request, so no account is charged


@dataclass(frozen=True, slots=True)
class LoadRequested:
    """An operator (or preload) loads the model regardless of the traffic. Clears FAILED."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class UnloadRequested:
    """An operator unloads the model: after its requests, or at once with `force`.

    `spec`: the new specification, if the unload also ends an operator's other settings. `reason` follows "it was".
    """

    model: ModelId
    force: bool = False
    spec: ModelSpec | None = None
    reason: str = "unloaded by an operator"


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    """An operator cancels the load of this model or replica, in any phase. A loaded model stays loaded."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class PinRequested:
    """An operator pins or unpins a model until the daemon ends. None: the configuration decides again."""

    model: ModelId
    pin: bool | None


@dataclass(frozen=True, slots=True)
class Respecified:
    """A model gets other settings. If its definition changed, its worker is replaced after the running requests."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker answers its health check. Also sent when an unready worker recovers."""

    model: ModelId
    generation: Generation


@dataclass(frozen=True, slots=True)
class WorkerUnready:
    """The worker's readiness probe failed too often: no new requests until it recovers. A remote's first event may be this."""

    model: ModelId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class ClientsRead:
    """How many bytes of its connection each client has read. Only for clients that now block an answer of this worker."""

    model: ModelId
    generation: Generation
    read: Mapping[TicketId, int]


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's whole process tree has ended. `crash` is None when llmux stopped the worker."""

    model: ModelId
    generation: Generation
    crash: Crash | None = None


@dataclass(frozen=True, slots=True)
class WorkerUnkillable:
    """The worker's process tree still exists after SIGKILL and a bounded wait."""

    model: ModelId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of a device. `outside_mib`: the use by other programs; None if the process list doesn't show it."""

    id: DeviceId
    free_mib: int
    stale: bool = False
    outside_mib: int | None = None
    lost: str | None = None  # why the device won't recover by itself; only for a stale reading


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """The memory that one worker's process tree takes on one device; None: unknown."""

    model: ModelId
    generation: Generation
    device: DeviceId
    used_mib: int | None


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """A reading of all devices and workers. `taken_at`: when the reading began, on the core's clock."""

    devices: tuple[DeviceSample, ...]
    workers: tuple[WorkerSample, ...]
    taken_at: float

    def by_device(self) -> list[MemorySampled]:
        """The reading split by device, so that the cost of an event doesn't grow with the number of devices."""
        workers: dict[DeviceId, list[WorkerSample]] = {}
        for worker in self.workers:
            workers.setdefault(worker.device, []).append(worker)
        return [MemorySampled((device,), tuple(workers.get(device.id, ())), self.taken_at) for device in self.devices]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The engine sends this no later than `Scheduler.deadline()`."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Accept no new requests, drain, and stop all workers."""


@dataclass(frozen=True, slots=True)
class HandoverRequested:
    """A handover to a successor begins: start no load and claim no memory until `HandoverEnded`."""


@dataclass(frozen=True, slots=True)
class HandoverEnded:
    """The handover has failed: this daemon keeps its workers."""


@dataclass(frozen=True, slots=True)
class WorkerAdopted:
    """A ready worker of the predecessor, now ours, with its running requests. Times are on the core's clock.

    `spec`: the specification at the worker's start. The model must be configured and have no worker.
    """

    spec: ModelSpec
    generation: Generation
    devices: Devices
    mib: int | Parts  # leased on each device; one number: the same on each
    tickets: tuple[TicketId, ...] = ()
    ready_at: float = 0.0
    last_used: float = 0.0
    load_s: float | None = None
    is_unloaded: bool = False  # an operator unloads the model: the worker ends after its requests
    kept_until: float = -math.inf  # until the keep-alive of its requests ends
    demands: tuple[Demand, ...] = ()  # of the tickets, in the same order; empty: unknown
    last_priority: int = NORMAL  # the class of the last request

    @property
    def model(self) -> ModelId:
        return self.spec.id


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    """A partner (a process that isn't our worker) requests memory. `spec` represents the partner among the models."""

    spec: ModelSpec
    partner: Partner


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A heartbeat of the partner. Fields that aren't None replace the known values."""

    lease: ModelId
    ttl_s: float | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The partner returns its memory, or no longer waits for memory."""

    lease: ModelId
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """A lease granted before this daemon started. It is valid even if too little memory is free."""

    spec: ModelSpec
    partner: Partner
    devices: Devices
    mib: int  # on each device


@dataclass(frozen=True, slots=True)
class LeasesSeen:
    """MiB by device that other coordinators have leased on shared devices. `trouble`: why this is unknown now."""

    others: Mapping[DeviceId, int] = field(default_factory=dict)
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Another coordinator may already use the memory of this worker or partner: stop it at once."""

    model: ModelId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class Mishandled:
    """`event` again, after handling it raised. `models` fail before and after it; other models are handled normally.

    `event` is None if handling it raised again: the event is dropped.
    """

    event: Event | None
    models: tuple[ModelId, ...]
    mistake: str  # the name of the exception


Event = (
    Configured
    | RequestArrived
    | RequestFinished
    | LoadRequested
    | UnloadRequested
    | LoadCancelled
    | PinRequested
    | Respecified
    | WorkerReady
    | WorkerUnready
    | ClientsRead
    | WorkerExited
    | WorkerUnkillable
    | MemorySampled
    | Tick
    | ShutdownRequested
    | HandoverRequested
    | HandoverEnded
    | WorkerAdopted
    | LeaseRequested
    | LeaseRenewed
    | LeaseEnded
    | LeaseRestored
    | LeasesSeen
    | LeaseLost
    | Mishandled
)
