"""Shared types: ids, specifications, states. `events`, `effects` and `plans` build on them.

Everything here is frozen. Time is a float of monotonic seconds that arrives as an argument; memory is in whole MiB. The
configured name identifies a *model*; `(model, generation)` identifies one *worker* of it. The generation grows with
every start, so a late message about an older process is recognised and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NewType

ModelId = NewType("ModelId", str)
DeviceId = NewType("DeviceId", str)
TicketId = NewType("TicketId", str)
Generation = NewType("Generation", int)

Devices = tuple[DeviceId, ...]
"""The devices of one worker, in order of ids: usually one; several if GPUs share the model."""

Parts = tuple[int, ...]
"""MiB on each of a worker's `Devices`, in their order."""

MODEL_PLACEHOLDER: Final = "{model}"
"""Represents the model in a message to a client, which may have requested the model by another name."""

PARTNER: Final = "partner"
"""The model type that represents a partner among the models."""

REMOTE: Devices = (DeviceId("remote"),)
"""The device of remote models. It isn't in the ledger and uses no local memory."""

DEFAULT_PRIORITY: Mapping[str, int] = {
    "asr": 300,
    "tts": 200,
    "image": 150,
    "vision": 130,
    "embedding": 120,
    "llm": 100,
}
"""Model priority by type; the lowest is evicted first. Source: docs/architecture.md, "Memory"."""


def on_each(mib: int | Parts, devices: Devices) -> Parts:
    """The MiB to take of each device: equal if `mib` is one number."""
    return (mib,) * len(devices) if isinstance(mib, int) else mib


# ---------------------------------------------------------------------------------------------------- specifications


class FootprintSource(StrEnum):
    """The source of a footprint, best first."""

    RAISED = "raised"  # a load with less ran out of memory
    EXPLICIT = "explicit"  # vram_mib in the configuration
    LEARNED = "learned"  # measured on this device for these launch arguments
    COMPUTED = "computed"  # from the file's own metadata
    FILE_SIZE = "file_size"  # size on disk times a factor
    NAME = "name"  # from "7b-q4" and the like in the name
    DEFAULT = "default"  # nothing is known


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a model is expected to take on a device, and the source of the figure."""

    mib: int
    source: FootprintSource
    detail: str = ""
    each_mib: int = 0  # added for each further device of a split model

    def share(self, parts: int) -> Footprint:
        """The footprint of one of `parts` equal parts."""
        if parts == 1:
            return self
        return replace(self, mib=-(-self.mib // parts), detail=f"one of {parts} parts of {self.mib} MiB: {self.detail}")


class Eviction(StrEnum):
    """Whether a model may be evicted for one of lower priority."""

    LAST_RESORT = "last_resort"  # only if evicting lower priorities is not enough
    STRICT = "strict"  # never


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The core's view of a configured model."""

    id: ModelId
    type: str
    priority: int
    footprint: Footprint  # of the whole model
    learned: Mapping[DeviceId, Footprint] = field(default_factory=dict)
    raised: Mapping[DeviceId, int] = field(default_factory=dict)  # MiB: a load with less ran out of memory there
    devices: Devices = ()  # allowed devices; empty: see `core.memory.device_sets.allowed`
    kinds: frozenset[str] | None = None  # GPU kinds that its program supports; None: unknown, so any
    gpus: int = 1  # how many devices share it equally, unless a device takes it whole
    spreads: bool = (
        False  # if no single device has room, split it over several; learned footprints are then of all together
    )
    pin: bool = False
    preload: bool = False
    keep_alive_s: float | None = None  # stays loaded this long after its last use; None: until its memory is needed
    own_keep_alive_s: float = (
        0.0  # the keep-alive in its own entry, in seconds: during it no less urgent request evicts the model
    )
    hold_s: float = 0.0  # no model of equal or lower priority evicts it this long after its last use
    target_inflight: int = 0  # concurrent requests per worker; 0: no limit
    shared_context: int = 0  # tokens that these requests share; 0: each has its own context
    replicas: int = 1  # workers to load together, if memory is free
    replica_max: int = 1  # maximum number of workers when the queue needs them
    replica_of: ModelId | None = None  # set iff this is a further replica of that model
    extra: bool = False  # a replica beyond `replicas`: loaded for a long queue, unloaded when idle
    max_queue: int | None = None  # overrides the limit queue_per_model
    drain_s: float | None = None  # overrides the limit of this name
    remote: bool = False  # another host runs it: needs no device or memory, and is never evicted
    by_worker: bool = False  # a remote model that a local worker calls
    definition: str = ""  # fingerprint of everything that determines how the worker runs
    footprint_key: str = ""  # fingerprint of everything that determines its memory; the key of learned values
    load_s: float | None = None  # how long its last load took, if an earlier daemon measured it
    remedy: str = "choose a smaller quantisation or context, or other devices"  # if larger than its devices
    trouble: str = ""  # set iff it can't run on this machine now, e.g. a missing file: the reason, for everybody

    @property
    def is_elsewhere(self) -> bool:
        """Whether the model has no local process at all."""
        return self.remote and not self.by_worker


REPLICA = re.compile(r"#[1-9][0-9]*$")
"""The end of a further replica's name, after the name of its model."""


def base_of(model: ModelId) -> ModelId:
    """The configured model: `model` itself, or the model of which it is a further replica."""
    return ModelId(REPLICA.sub("", model)) if "#" in model else model


@dataclass(frozen=True, slots=True)
class Partner:
    """A lease for a process that somebody else runs, instead of a model."""

    holder: str  # the owner's name, for people
    ttl_s: float  # the lease ends this long after the last heartbeat
    waits: bool = False  # whether to wait also for busy models and other partners
    pid: int | None = None  # root of the process tree that uses the memory; None: unknown
    until: float | None = None  # set iff granted: when the lease ends without a heartbeat


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A GPU, or host memory. `total_mib` is the budget that the ledger distributes."""

    id: DeviceId
    total_mib: int
    margin_mib: int
    returns_at_exit: bool = False  # host memory is back before the exit is visible, so the next reading shows it
    takes_whole: bool = False  # host memory never shares a model with another device
    kind: str = ""  # as in `ModelSpec.kinds`
    title: str = ""

    @property
    def label(self) -> str:
        """The name in messages for people: its title, else its id."""
        return self.title or self.id

    @property
    def usable_mib(self) -> int:
        """The largest model that can fit."""
        return self.total_mib - self.margin_mib

    def need(self, model: ModelSpec) -> Footprint:
        """The footprint to lease here: explicit, else learned here, else the general estimate. Never one that was too small."""
        known = None if model.footprint.source is FootprintSource.EXPLICIT else model.learned.get(self.id)
        need = known or model.footprint.share(1 if self.takes_whole else model.gpus)
        raised_mib = model.raised.get(self.id, 0)
        if raised_mib <= need.mib:
            return need
        return Footprint(raised_mib, FootprintSource.RAISED, f"a load with less ran out of memory on {self.label}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of the scheduler; docs/reference/configuration.md explains them. Seconds unless the name says otherwise."""

    queue_total: int = 512
    queue_per_model: int = 64
    queue_wait_s: float = 600.0
    min_residency_s: float = 30.0
    aging_s: float = 60.0  # extra wait after which a request precedes one of the next higher class; infinite: never
    overtakes: int = 64  # later requests that a loaded model may answer while another model waits for its memory
    linger_s: float = 0.25  # the longest that a model counts as in demand after a request; see the admission policy
    default_after_s: float = 300.0  # without other requests for this long, a default model is loaded again
    loads_per_device: int = 1
    replica_idle_s: float = 60.0  # a replica beyond `replicas` is unloaded after this idle time
    drain_s: float | None = None  # infinite: no request is cut for another model; None: the admission policy decides
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    backoff_jitter: float = 0.25
    backoff_reset_s: float = 600.0
    crash_limit: int = 5
    crash_window_s: float = 600.0
    failed_retry_s: float = 600.0
    memory_warn_s: float = 5.0
    memory_quarantine_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How models compete for memory."""

    eviction: Eviction = Eviction.LAST_RESORT
    max_loaded: Mapping[str, int] = field(default_factory=dict)  # by model type
    default_models: tuple[ModelId, ...] = ()  # loaded again when no other model is requested
    admission: str = "fair"  # a name in `admission.POLICIES`


# ---------------------------------------------------------------------------------------------------------- lifecycle


class WorkerState(StrEnum):
    """The state of a model's worker, as the scheduler sees it."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


HAS_WORKER = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.STOPPING})
"""States with a process that holds (or may hold) memory."""

SERVES = frozenset({WorkerState.READY, WorkerState.DRAINING})
"""States in which running requests continue."""


class CrashClass(StrEnum):
    """Why a worker ended without being stopped."""

    OUT_OF_MEMORY = "out_of_memory"
    BAD_ARGUMENTS = "bad_arguments"
    GPU_LOST = "gpu_lost"
    PORT = "port"
    START_TIMEOUT = "start_timeout"
    UNRESPONSIVE = "unresponsive"
    NOT_INSTALLED = "runtime_not_installed"
    UNUSABLE = "model_unusable"  # its files, program or devices are not here as configured
    HOST = "host"  # this machine refused the start: a full disk, no processes or descriptors left
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Crash:
    """Why and how a worker crashed: its class, one line for people, and the last log lines.

    Worker output may contain prompts. `summary` never quotes it and is for everybody; `operator_summary` and `log_tail` are
    for operators only.
    """

    kind: CrashClass
    summary: str
    log_tail: tuple[str, ...] = ()
    exit_code: int | None = None  # negative: the signal's number
    quote: str = ""  # the same line, quoted from the worker's output

    @property
    def operator_summary(self) -> str:
        """The line for operators."""
        return self.quote or self.summary


class StopCause(StrEnum):
    """The cause for stopping a worker, in one word; the effect's `reason` has the details."""

    ROOM = "room"  # evicted for another model
    IDLE = "idle"  # its keep_alive_s is over
    OPERATOR = "operator"
    CONFIGURATION = "configuration"  # changed or removed
    UNWANTED = "unwanted"  # no request waits for the load any more
    SHUTDOWN = "shutdown"
    LEASE = "lease"  # another coordinator may use its memory
    MISTAKE = "mistake"  # a bug in llmux while handling an event about it


class RejectCode(StrEnum):
    """Why a request gets an error instead of a worker. Errors for clients carry these codes."""

    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    BUDGET_TOO_SMALL = "budget_too_small"  # rejected before queueing
    BUDGET_EXCEEDED = "budget_exceeded"  # its budget was over before a worker took it
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    MODEL_FAILED = "model_failed"
    LOAD_FAILED = "load_failed"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    DEVICE_QUARANTINED = "device_quarantined"
    DEVICE_LOST = "device_lost"
    RUNTIME_NOT_INSTALLED = "runtime_not_installed"
    MODEL_UNLOADED = "model_unloaded"
    REMOTE_UNAVAILABLE = "remote_unavailable"
    SHUTTING_DOWN = "shutting_down"
