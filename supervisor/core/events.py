"""The events that the scheduler handles: whatever happens outside the core. Everything here is frozen."""

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
    """The whole configuration, at boot and after every reload. Models not named any more are stopped and forgotten."""

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
    """A dispatched or queued request is over, however it ended (its client may have disconnected)."""

    ticket: TicketId
    tokens: int = 0  # that its answer reports, where an account counts them
    served: bool = True  # False: its worker never got it, so it costs nothing


@dataclass(frozen=True, slots=True)
class LoadRequested:
    """An operator (or preload) wants the model loaded whatever the traffic. Clears FAILED."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class UnloadRequested:
    """An operator unloads the model: after its requests, or at once with `force`.

    `spec`: the specification from then on, where an operator's other settings end with this. `reason` follows "it was".
    """

    model: ModelId
    force: bool = False
    spec: ModelSpec | None = None
    reason: str = "unloaded by an operator"


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    """An operator cancels the load of this model, or replica, wherever it stands. What is loaded stays loaded."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class PinRequested:
    """An operator pins or unpins a model until the daemon ends. None: it is pinned as the configuration says again."""

    model: ModelId
    pin: bool | None


@dataclass(frozen=True, slots=True)
class Respecified:
    """A model has other settings from now on. A worker of another definition is replaced after its requests."""

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
    """How many bytes of its connection each client has read so far; only clients that hold up a request of this worker now."""

    model: ModelId
    generation: Generation
    read: Mapping[TicketId, int]


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's whole process tree is gone. `crash` is None when llmux stopped it."""

    model: ModelId
    generation: Generation
    crash: Crash | None = None


@dataclass(frozen=True, slots=True)
class WorkerUnkillable:
    """The worker's process tree is still there after SIGKILL and a bounded wait."""

    model: ModelId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of a device. `outside_mib` is what others use, None where the process list can't tell."""

    id: DeviceId
    free_mib: int
    stale: bool = False
    outside_mib: int | None = None
    lost: str | None = None  # why it won't be readable again by itself; only of a stale one


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
        """The reading, split into one for each device: so no event costs more on a machine with many."""
        workers: dict[DeviceId, list[WorkerSample]] = {}
        for worker in self.workers:
            workers.setdefault(worker.device, []).append(worker)
        return [MemorySampled((device,), tuple(workers.get(device.id, ())), self.taken_at) for device in self.devices]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent no later than `Scheduler.deadline()`."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Take nothing new, drain, stop everything."""


@dataclass(frozen=True, slots=True)
class HandoverRequested:
    """A successor is to get the workers: begin no load and claim no memory until `HandoverEnded`."""


@dataclass(frozen=True, slots=True)
class HandoverEnded:
    """The hand-over has failed: there is no successor."""


@dataclass(frozen=True, slots=True)
class WorkerAdopted:
    """A ready worker of our predecessor is ours, with the predecessor's requests that run on it. Times on the core's clock.

    `spec` is what it was started with. Its model must be configured, and have no worker.
    """

    spec: ModelSpec
    generation: Generation
    devices: Devices
    mib: int | Parts  # leased on each of them; one number: the same on each
    tickets: tuple[TicketId, ...] = ()
    ready_at: float = 0.0
    last_used: float = 0.0
    load_s: float | None = None
    is_unloaded: bool = False  # an operator unloads it: it ends after its requests
    kept_until: float = -math.inf  # its requests want it kept until then
    demands: tuple[Demand, ...] = ()  # of the tickets, in their order; empty: unknown
    last_priority: int = NORMAL  # the class of the last request

    @property
    def model(self) -> ModelId:
        return self.spec.id


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    """A partner, somebody who isn't one of our workers, wants memory. `spec` stands for it among the models."""

    spec: ModelSpec
    partner: Partner


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A heartbeat: the partner lives. What isn't None replaces what was known."""

    lease: ModelId
    ttl_s: float | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The partner gives its memory back, or doesn't wait for it any more."""

    lease: ModelId
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """A lease that was granted before this daemon began: it holds, whatever is free."""

    spec: ModelSpec
    partner: Partner
    devices: Devices
    mib: int  # on each of them


@dataclass(frozen=True, slots=True)
class LeasesSeen:
    """How many MiB coordinators that share our devices have leased there; `trouble`: why that is unknown now."""

    others: Mapping[DeviceId, int] = field(default_factory=dict)
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Another coordinator may have the memory of this worker, or partner, by now: it must stop at once."""

    model: ModelId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class Mishandled:
    """`event` once more, since handling it raised. These models fail before and after it; the others get its consequences.

    `event` is None where it raises nevertheless: nothing of it counts.
    """

    event: Event | None
    models: tuple[ModelId, ...]
    mistake: str  # the kind of what was raised


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
