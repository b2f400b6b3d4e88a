"""The state of one model: its worker's life, its requests, its load intent, and the claims on its memory.

Related fields form one frozen value. A comment beside each field names the condition under which it is set;
`ModelState.check()` reports whether these conditions hold.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from supervisor.core.demand import NORMAL, Demand
from supervisor.core.memory.device_ledger import Holder
from supervisor.core.memory.device_sets import Spread, device_sets, need_mib, spread
from supervisor.core.planning.plans import Option
from supervisor.core.types import (
    HAS_WORKER,
    REMOTE,
    SERVES,
    Crash,
    DeviceId,
    Devices,
    DeviceSpec,
    Footprint,
    FootprintSource,
    Generation,
    ModelId,
    ModelSpec,
    Partner,
    Parts,
    StopCause,
    TicketId,
    WorkerState,
    on_each,
)

RELOAD_MIB_PER_S = 1024
"""Assumed load speed of a model before its first timed load."""

NEVER_STARTED = Generation(0)
HISTORY_LENGTH = 40


@dataclass(slots=True)
class Life:
    """A model's state, when and why it was entered, and the last transitions. Only `lifecycle.advance` changes it."""

    since: float
    state: WorkerState = WorkerState.STOPPED
    reason: str = "never loaded"
    _story: deque[tuple[float, str, WorkerState, str]] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))

    def enter(self, state: WorkerState, trigger: str, now: float, reason: str) -> None:
        """Enter `state` now, and add the transition to the history."""
        self.state, self.since, self.reason = state, now, reason
        self._story.append((now, trigger, state, reason))

    def history_text(self) -> str:
        """The last transitions, one per line, oldest first."""
        return "\n".join(f"  {at:.3f} {trigger} -> {state}: {reason}" for at, trigger, state, reason in self._story)


@dataclass(frozen=True, slots=True)
class Worker:
    """The process of a model, or the connection to a remote model."""

    devices: Devices
    answering: bool = False  # True only while READY or DRAINING; False holds new requests back
    stuck: bool = False  # set iff its process tree survived SIGKILL
    exited: bool = False  # set iff its process tree has ended but its memory is not back; only while STOPPING


@dataclass(frozen=True, slots=True)
class Drain:
    """A drain: the worker gets no new requests, and stops when the running ones end.

    Either another model claims its memory (`cause` is ROOM; if the claim ends, so does the drain, without a stop), or an
    operator, a reload or the shutdown ordered the drain (any other cause).
    """

    cause: StopCause
    reason: str
    since: float
    until: float  # when running requests are cut; infinite: never
    look_at: float | None = (
        None  # set iff requests whose clients stopped reading are cut earlier: the time of the next check
    )
    read: Mapping[TicketId, int] = field(default_factory=dict)  # bytes read by the blocking clients at the last check

    @property
    def is_ordered(self) -> bool:
        return self.cause is not StopCause.ROOM


@dataclass(frozen=True, slots=True)
class LoadIntent:
    """Reasons to load the model besides queued requests. At least one of the fields is set."""

    asked_at: float | None = None  # set iff an operator requested the load: the time of the request
    restore: bool = False  # set iff it was loaded or is preloaded: load only without an eviction
    default: bool = False  # set iff it returns as a default model: may evict models that were idle for long


@dataclass(frozen=True, slots=True)
class Change:
    """The new specification, applied when the model's worker has ended."""

    spec: ModelSpec | None  # None: the model is removed


@dataclass(frozen=True, slots=True)
class CrashHistory:
    """The crashes that still count."""

    times: tuple[float, ...] = ()  # within the crash window; empty after a reset or a long time of service
    last: Crash | None = None  # set iff the last worker crashed, until the next start or a reset
    retry_at: float | None = None  # set iff BACKOFF, or FAILED with a cause that may pass
    refusals: int = 0  # consecutive starts that the host refused; not counted as crashes
    given_up: bool = (
        False  # set iff the model failed and no later start succeeded: the next crash fails the model again
    )
    oom_retried: bool = False  # set iff a start ran out of memory and no later one has succeeded yet


@dataclass(slots=True)
class ModelState:
    """One model: its worker's life, its requests, its load intent, and the claims on its memory."""

    spec: ModelSpec
    life: Life
    generation: Generation = NEVER_STARTED  # of the last start
    worker: Worker | None = None  # set iff STARTING, READY, DRAINING or STOPPING
    in_flight: dict[TicketId, Demand] = field(default_factory=dict)  # not empty while DRAINING; empty without a worker
    drain: Drain | None = None  # set iff DRAINING
    claimed_by: ModelId | None = None  # set iff that model waits for this model's memory; the first claim counts
    load_intent: LoadIntent | None = None  # set iff there is a reason to load besides requests; never while READY
    change: Change | None = None  # set iff a reload waits for the end of the worker or of its last lease
    mistake: Crash | None = (
        None  # set iff the model fails when its worker has ended; only while STOPPING, or DRAINING for this reason
    )
    crashes: CrashHistory = field(default_factory=CrashHistory)
    partner: Partner | None = None  # set iff this represents a partner: a process of somebody else has the memory
    pin: bool | None = None  # set iff an operator pinned or unpinned the model; None: as configured
    keep_alive_at: float | None = None  # set iff a timer will check the idle time; only while READY
    kept_until: float = float("-inf")  # latest end of the keep-alives that finished requests set
    returns_at: float | None = None  # set iff it is a default model: when a timer checks whether it should return
    unloaded_by_operator: bool = False  # set iff an operator unloaded the model and no start followed
    overtakes: int = 0  # later requests that it got while another model waits for its memory
    last_used: float = 0.0
    last_priority: int = NORMAL  # the class of its last request, or of the operator who loaded it
    ready_at: float = 0.0  # when it last became ready
    stopped_at: float = float("-inf")  # when its worker was last stopped
    load_s: float | None = None  # set iff it was loaded with this specification before: duration of the last load
    last_plan: str = ""  # kind and models of the last plan, so that an equal plan isn't recorded again
    looked_at: float = float("-inf")  # the last time set by `SchedulerState.wake_by`
    last_wanted_at: float = float("-inf")  # when it was last requested as a further replica
    prefixes: OrderedDict[int, ModelId] = field(
        default_factory=OrderedDict
    )  # conversation prefix → replica, most recent last
    known_options: tuple[ModelSpec, tuple[DeviceSpec, ...], dict[Devices, Option], Spread | None] | None = field(
        default=None, compare=False
    )

    UNRECORDED: ClassVar = ("known_options",)  # recomputed when needed

    @property
    def id(self) -> ModelId:
        return self.spec.id

    @property
    def queue_key(self) -> ModelId:
        """The id of the queue for its requests: its own id, or that of the model of which it is a replica."""
        return self.spec.replica_of or self.spec.id

    @property
    def serves(self) -> bool:
        """Whether the model has a worker that takes requests, or will soon."""
        return self.life.state is WorkerState.READY or self.life.state is WorkerState.STARTING

    @property
    def has_failed(self) -> bool:
        """Whether the model has failed, or will fail when its last worker has ended."""
        return self.life.state is WorkerState.FAILED or self.mistake is not None

    @property
    def state(self) -> WorkerState:
        return self.life.state

    @property
    def has_worker(self) -> bool:
        return self.worker is not None

    @property
    def holder(self) -> Holder:
        return (self.spec.id, self.generation)

    @property
    def devices(self) -> Devices:
        return () if self.worker is None else self.worker.devices

    @property
    def answering(self) -> bool:
        return self.worker is not None and self.worker.answering

    @property
    def stuck(self) -> bool:
        return self.worker is not None and self.worker.stuck

    @property
    def exited(self) -> bool:
        return self.worker is not None and self.worker.exited

    @property
    def crash(self) -> Crash | None:
        return self.crashes.last

    @property
    def asked_at(self) -> float | None:
        return None if self.load_intent is None else self.load_intent.asked_at

    @property
    def restore(self) -> bool:
        return self.load_intent is not None and self.load_intent.restore

    @property
    def used_by(self) -> int:
        """The most urgent class of its running requests, else the class of the last request."""
        return min((demand.priority for demand in self.in_flight.values()), default=self.last_priority)

    @property
    def pinned(self) -> bool:
        """Whether the model must never be evicted."""
        return self.spec.pin if self.pin is None else self.pin

    @property
    def removed(self) -> bool:
        """Whether the model is no longer configured. It is forgotten when its worker and leases are gone."""
        return self.change is not None and self.change.spec is None

    @property
    def reload_s(self) -> float:
        """Expected seconds of a reload: the duration of the last load, else a guess by size."""
        return max(1.0, self.spec.footprint.mib / RELOAD_MIB_PER_S) if self.load_s is None else self.load_s

    def request_load(self, now: float) -> float:
        """Note that an operator requests the load. Returns the time of the first such request."""
        since = now if self.asked_at is None else self.asked_at
        self.load_intent = replace(self.load_intent or LoadIntent(), asked_at=since)
        return since

    def drop_operator_request(self) -> None:
        """Drop the operator's request to load the model."""
        rest = replace(self.load_intent or LoadIntent(), asked_at=None)
        self.load_intent = None if rest == LoadIntent() else rest

    def request_restore(self) -> None:
        """Load the model as soon as this needs no eviction."""
        self.load_intent = replace(self.load_intent or LoadIntent(), restore=True)

    def set_worker(self, *, answering: bool | None = None, stuck: bool | None = None) -> None:
        """Change the flags of the model's worker, which must exist."""
        worker = self.worker
        assert worker is not None, f"{self.id} has no worker"
        self.worker = replace(
            worker,
            answering=worker.answering if answering is None else answering,
            stuck=worker.stuck if stuck is None else stuck,
        )

    def options(self, devices: tuple[DeviceSpec, ...]) -> dict[Devices, Option]:
        """The device sets of `devices` where the model may run, with the leases that it needs there, in order of ids."""
        return self._options_and_spread(devices)[0]

    def spread(self, devices: tuple[DeviceSpec, ...]) -> Spread | None:
        """How to split the model over several of `devices` if no option is possible; None: it is never split."""
        return self._options_and_spread(devices)[1]

    def _options_and_spread(self, devices: tuple[DeviceSpec, ...]) -> tuple[dict[Devices, Option], Spread | None]:
        known = self.known_options
        if known is None or known[0] is not self.spec or known[1] is not devices:
            apart = spread(self.spec, devices)
            sets = {tuple(device.id for device in chosen): chosen for chosen in device_sets(self.spec, devices)}
            alike: dict[tuple[int, int, bool], Parts] = {}  # for single devices without measurements
            options = {}
            for ids in sorted(sets):
                first = sets[ids][0]
                is_plain = len(ids) == 1 and first.id not in self.spec.learned and first.id not in self.spec.raised
                like = (first.total_mib, first.margin_mib, first.takes_whole)
                parts = alike.get(like) if is_plain else None
                if parts is None:
                    parts = on_each(need_mib(self.spec, sets[ids], alone=apart is None), ids)
                    if is_plain:
                        alike[like] = parts
                options[ids] = Option(ids, parts)
            known = self.known_options = (self.spec, devices, options, apart)
        return known[2], known[3]

    def least_mib(self, device: DeviceId, devices: tuple[DeviceSpec, ...]) -> int | None:
        """The least MiB that the model may have to lease on `device`; None: it never runs there."""
        options, apart = self._options_and_spread(devices)
        if apart is not None and device in apart.devices:
            return apart.margin_mib + 1
        if (alone := options.get((device,))) is not None:
            return alone.need_mib[0]
        return min(
            (option.need_mib[ids.index(device)] for ids, option in options.items() if device in ids), default=None
        )

    def specify(self, spec: ModelSpec) -> None:
        """Take another specification. With another footprint key the model loads differently, so its load time is unknown."""
        if spec.footprint_key != self.spec.footprint_key:
            self.load_s = spec.load_s
            self.crashes = replace(self.crashes, oom_retried=False)
        self.spec = spec

    def learn(self, device: DeviceId, mib: int) -> None:
        """Lease `mib`, the measured use, for the next load on `device`."""
        learned = {**self.spec.learned, device: Footprint(mib, FootprintSource.LEARNED, f"measured on {device}")}
        self._change_need(device, replace(self.spec, learned=learned))

    def raise_footprint(self, device: DeviceId, mib: int) -> None:
        """Lease at least `mib` on `device` from now on: a load with less ran out of memory."""
        self._change_need(device, replace(self.spec, raised={**self.spec.raised, device: mib}))

    def _change_need(self, device: DeviceId, spec: ModelSpec) -> None:
        """Take a specification that differs only in the need on one device. If possible, recompute only that option."""
        known = self.known_options
        if known is not None and known[0] is self.spec and known[3] is None and all(len(ids) == 1 for ids in known[2]):
            places = [each for each in known[1] if each.id == device and (device,) in known[2]]
            options = known[2] | {(each.id,): Option((each.id,), (need_mib(spec, (each,)),)) for each in places}
            self.known_options = (spec, known[1], options, None)
        self.spec = spec

    def check(self) -> Iterator[tuple[bool, str]]:
        """The invariants of this model alone: (holds, text) for each."""
        state, worker, drain, crashes = self.state, self.worker, self.drain, self.crashes
        yield (worker is not None) == (state in HAS_WORKER), "a worker iff the state has one"
        if worker is not None:
            yield bool(worker.devices), "a worker is on a device"
            yield not worker.answering or state in SERVES, "only READY and DRAINING workers answer"
            yield (
                not worker.exited or (state is WorkerState.STOPPING and not worker.stuck),
                "exited only while STOPPING",
            )
            yield not (worker.exited and self.in_flight), "no requests without a process"
            yield (worker.devices == REMOTE) == self.spec.remote, "REMOTE iff others run it"
        yield (
            not self.in_flight or state in SERVES or state is WorkerState.STOPPING,
            "requests only where they are served",
        )
        yield (drain is not None) == (state is WorkerState.DRAINING), "a drain iff DRAINING"
        if drain is not None:
            yield bool(self.in_flight), "nothing to drain"
            yield drain.look_at is None or not drain.is_ordered, "an ordered drain looks at no clients"
            yield drain.is_ordered or self.claimed_by is not None, "drained for nobody"
        yield self.partner is None or not self.in_flight, "a partner has no requests"
        yield self.load_intent is None or self.load_intent != LoadIntent(), "an empty wish"
        yield self.load_intent is None or state is not WorkerState.READY, "wished for although it is ready"
        yield self.keep_alive_at is None or state is WorkerState.READY, "an idle timer only while READY"
        if self.mistake is not None:
            is_ordered = drain is not None and drain.is_ordered
            yield is_ordered or state is WorkerState.STOPPING, "a mistake over a worker that isn't stopped"
        if crashes.retry_at is None:
            yield state is not WorkerState.BACKOFF, "BACKOFF without an end"
        else:
            yield state in {WorkerState.BACKOFF, WorkerState.FAILED}, "a time to retry only after a crash"
        yield crashes.last is None or worker is None, "a start forgets the last crash"
        if state in {WorkerState.BACKOFF, WorkerState.FAILED}:
            yield crashes.last is not None and bool(crashes.times or crashes.refusals), "failed without a crash"
        if self.change is not None and (worker is not None or not self.removed):
            yield state in {WorkerState.DRAINING, WorkerState.STOPPING}, "a change waits for a worker that goes"
