"""The effects of an event: the scheduler's orders to the engine. Everything here is frozen."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.core.admission.limits import Standing
from supervisor.core.demand import Expected
from supervisor.core.types import DeviceId, Devices, Generation, ModelId, Parts, RejectCode, StopCause, TicketId


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Spawn the model's worker on `devices`; on REMOTE, connect. Answer: WorkerReady, or WorkerExited with a crash."""

    model: ModelId
    generation: Generation
    devices: Devices
    lease_mib: Parts


@dataclass(frozen=True, slots=True)
class StopWorker:
    """SIGTERM, grace, SIGKILL (at once with `force`). Answer: WorkerExited or WorkerUnkillable."""

    model: ModelId
    generation: Generation
    cause: StopCause
    reason: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the ticket's request to this worker now. Answer: RequestFinished."""

    ticket: TicketId
    model: ModelId
    generation: Generation


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The load of a full queue, for the refused client."""

    depth: int  # number of waiting requests
    mean_s: float | None  # mean wait of the requests dispatched recently; None: none was dispatched


@dataclass(frozen=True, slots=True)
class Reject:
    """End the ticket with an error. Without `retry_after_s` a retry only helps after a person has acted.

    `message` names the ticket's model as `types.MODEL_PLACEHOLDER`.
    """

    ticket: TicketId
    code: RejectCode
    message: str
    retry_after_s: float | None = None
    about: Standing | QueueLoad | Expected | None = None  # the exceeded limit, the full queue, or the expected time


@dataclass(frozen=True, slots=True)
class CutRequest:
    """End a dispatched request now, because its worker stops."""

    ticket: TicketId
    reason: str


@dataclass(frozen=True, slots=True)
class AskClients:
    """Ask how far the clients of this draining worker have read. Answer: ClientsRead."""

    model: ModelId
    generation: Generation


@dataclass(frozen=True, slots=True)
class Learn:
    """Store how much memory this model took on this device with these launch arguments. `raised`: `mib` is a lower bound."""

    model: ModelId
    device: DeviceId
    footprint_key: str
    mib: int
    raised: bool = False  # set iff not measured: a load with less ran out of memory


@dataclass(frozen=True, slots=True)
class LearnLoad:
    """Store how long this model's load took."""

    model: ModelId
    footprint_key: str
    load_s: float


@dataclass(frozen=True, slots=True)
class Alert:
    """A message for operators; `code` is stable, e.g. `device.quarantined`."""

    code: str
    message: str
    device: DeviceId | None = None
    model: ModelId | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and its reason, for `llmux why`. `kind` is stable, e.g. `evict`, `admit`, `wait`."""

    kind: str
    model: ModelId | None
    reason: str


Effect = StartWorker | StopWorker | Dispatch | Reject | CutRequest | AskClients | Learn | LearnLoad | Alert | Decided
