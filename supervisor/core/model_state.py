"""The state of one model: its worker's life, its requests, and the wishes and claims on it.

What belongs together is one frozen value. A comment beside each field names the condition under which it is set, and
`ModelState.check()` tells which of these conditions hold.
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
"""Guess of how fast a model loads before its first load was timed."""

NEVER_STARTED = Generation(0)
STORY_LENGTH = 40


@dataclass(slots=True)
class Life:
    """A model's state, when and why it was entered, and the last transitions. Only `lifecycle.advance` changes it."""

    since: float
    state: WorkerState = WorkerState.STOPPED
    reason: str = "never loaded"
    _story: deque[tuple[float, str, WorkerState, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    def enter(self, state: WorkerState, trigger: str, now: float, reason: str) -> None:
        """Enter `state` now, and add that to the story."""
        self.state, self.since, self.reason = state, now, reason
        self._story.append((now, trigger, state, reason))

    def story(self) -> str:
        """The last transitions, one per line, oldest first."""
        return "\n".join(f"  {at:.3f} {trigger} -> {state}: {reason}" for at, trigger, state, reason in self._story)


@dataclass(frozen=True, slots=True)
class Worker:
    """The process of a model, or the connection to a remote model."""

    devices: Devices
    answering: bool = False  # True only while READY or DRAINING; False holds new requests back
    stuck: bool = False  # set iff it survived SIGKILL and its process tree still exists
    exited: bool = False  # set iff its process tree is gone but its memory is not back yet; only while STOPPING


@dataclass(frozen=True, slots=True)
class Drain:
    """Why a worker gets no new requests and is stopped when the running ones end.

    Either another model claims its memory (`cause` is ROOM; ends without a stop when the claim does), or an operator,
    a reload or the shutdown ordered it (any other cause).
    """

    cause: StopCause
    reason: str
    since: float
    until: float  # when its running requests are cut; infinite: never
    look_at: float | None = None  # set iff requests whose clients don't read are cut earlier: the next look at them
    read: Mapping[TicketId, int] = field(default_factory=dict)  # what the clients that held it up had read at the last

    @property
    def is_ordered(self) -> bool:
        return self.cause is not StopCause.ROOM


@dataclass(frozen=True, slots=True)
class LoadIntent:
    """Reasons to load the model besides queued requests. At least one of the fields is set."""

    asked_at: float | None = None  # set iff an operator asked for it: since then
    restore: bool = False  # set iff it was loaded or is preloaded: load it only if nothing has to go for it
    default: bool = False  # set iff it comes back as a default model: what nobody has used for long may go for it


@dataclass(frozen=True, slots=True)
class Change:
    """The specification that a new configuration gives the model when its worker is gone."""

    spec: ModelSpec | None  # None: the model is removed


@dataclass(frozen=True, slots=True)
class CrashHistory:
    """The crashes that still count."""

    times: tuple[float, ...] = ()  # those within the crash window; none after a reset or a long time of service
    last: Crash | None = None  # set iff the last worker ended by itself, until the next start or a reset
    retry_at: float | None = None  # set iff BACKOFF, or FAILED of a cause that may mend itself
    refusals: int = 0  # starts in a row that the host refused; they don't count as crashes
    given_up: bool = False  # set iff it failed and no later start has succeeded: the next crash fails it again
    oom_retried: bool = False  # set iff a start ran out of memory and no later one has succeeded yet


@dataclass(slots=True)
class ModelState:
    """One model: its worker's life, its requests, and the wishes and claims on it."""

    spec: ModelSpec
    life: Life
    generation: Generation = NEVER_STARTED  # of its last start
    worker: Worker | None = None  # set iff STARTING, READY, DRAINING or STOPPING
    in_flight: dict[TicketId, Demand] = field(default_factory=dict)  # not empty while DRAINING; empty without a worker
    drain: Drain | None = None  # set iff DRAINING
    claimed_by: ModelId | None = None  # set iff that model waits for this one's memory; the first claim counts
    load_intent: LoadIntent | None = None  # set iff not only requests want it; never while READY
    change: Change | None = None  # set iff a reload waits for the end of its worker, or of the last of its leases
    mistake: Crash | None = (
        None  # set iff it has failed once its worker is gone; only while STOPPING, or DRAINING for that
    )
    crashes: CrashHistory = field(default_factory=CrashHistory)
    partner: Partner | None = None  # set iff it is no model: somebody else's process has the memory
    pin: bool | None = None  # set iff an operator pinned or unpinned it; None: as configured
    keep_alive_at: float | None = None  # set iff a timer will see whether it has been idle for too long; only READY
    kept_until: float = float("-inf")  # when the last keep-alive of a request ends that is over
    returns_at: float | None = None  # set iff it is a default model: when a timer sees whether it is to come back
    unloaded_by_operator: bool = False  # set iff an operator unloaded it and no later start has begun
    overtakes: int = 0  # later requests that it was given while another model waits for its memory
    last_used: float = 0.0
    last_priority: int = NORMAL  # the class of the request that used it last, or that of an operator who loaded it
    ready_at: float = 0.0  # when it last became ready
    stopped_at: float = float("-inf")  # when its worker was last told to stop
    load_s: float | None = None  # set iff it was loaded before as it is specified now: how long the last load took
    last_plan: str = ""  # kind and models of the last plan, so that each is told only once
    looked_at: float = float("-inf")  # the last time that `SchedulerState.wake_by` has set
    last_wanted_at: float = float("-inf")  # when it was last wanted as a further replica
    prefixes: OrderedDict[int, ModelId] = field(
        default_factory=OrderedDict
    )  # of conversations, the last one last: its replica
    known_options: tuple[ModelSpec, tuple[DeviceSpec, ...], dict[Devices, Option], Spread | None] | None = field(
        default=None, compare=False
    )

    UNRECORDED: ClassVar = ("known_options",)  # made anew when needed

    @property
    def id(self) -> ModelId:
        return self.spec.id

    @property
    def queue_key(self) -> ModelId:
        """The model under whose name its requests wait: itself, or the model of which it is a replica."""
        return self.spec.replica_of or self.spec.id

    @property
    def serves(self) -> bool:
        """Has the model a worker that takes requests, or will soon?"""
        return self.life.state is WorkerState.READY or self.life.state is WorkerState.STARTING

    @property
    def has_failed(self) -> bool:
        """Has the model failed, or will it have once its last worker is gone?"""
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
        """The most urgent class of its requests, or else that of the last one."""
        return min((demand.priority for demand in self.in_flight.values()), default=self.last_priority)

    @property
    def pinned(self) -> bool:
        """Must the model never be evicted?"""
        return self.spec.pin if self.pin is None else self.pin

    @property
    def removed(self) -> bool:
        """Is the model no longer configured? It is forgotten when nothing of it is left."""
        return self.change is not None and self.change.spec is None

    @property
    def reload_s(self) -> float:
        """How many seconds loading it again is expected to take: as long as the last load, else by its size."""
        return max(1.0, self.spec.footprint.mib / RELOAD_MIB_PER_S) if self.load_s is None else self.load_s

    def request_load(self, now: float) -> float:
        """An operator wants it loaded. Returns since when."""
        since = now if self.asked_at is None else self.asked_at
        self.load_intent = replace(self.load_intent or LoadIntent(), asked_at=since)
        return since

    def drop_operator_request(self) -> None:
        """Drop the operator's wish."""
        rest = replace(self.load_intent or LoadIntent(), asked_at=None)
        self.load_intent = None if rest == LoadIntent() else rest

    def request_restore(self) -> None:
        """Want the model loaded whenever nothing has to go for it."""
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
        """The device sets where the model may go, of these devices, with the leases it needs there, in the order of ids."""
        return self._options_and_spread(devices)[0]

    def spread(self, devices: tuple[DeviceSpec, ...]) -> Spread | None:
        """How the model goes over several of these devices where no option is possible; None: it never does."""
        return self._options_and_spread(devices)[1]

    def _options_and_spread(self, devices: tuple[DeviceSpec, ...]) -> tuple[dict[Devices, Option], Spread | None]:
        known = self.known_options
        if known is None or known[0] is not self.spec or known[1] is not devices:
            apart = spread(self.spec, devices)
            sets = {tuple(device.id for device in chosen): chosen for chosen in device_sets(self.spec, devices)}
            alike: dict[tuple[int, int, bool], Parts] = {}  # for single devices of which nothing was measured
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
        """The least MiB that the model may have to lease on `device`; None: it never goes there."""
        options, apart = self._options_and_spread(devices)
        if apart is not None and device in apart.devices:
            return apart.margin_mib + 1
        if (alone := options.get((device,))) is not None:
            return alone.need_mib[0]
        return min(
            (option.need_mib[ids.index(device)] for ids, option in options.items() if device in ids), default=None
        )

    def specify(self, spec: ModelSpec) -> None:
        """Take another specification. One with another footprint key loads differently, so the load time is no longer known."""
        if spec.footprint_key != self.spec.footprint_key:
            self.load_s = spec.load_s
            self.crashes = replace(self.crashes, oom_retried=False)
        self.spec = spec

    def learn(self, device: DeviceId, mib: int) -> None:
        """Lease `mib` for the next load on `device`: so much was measured."""
        learned = {**self.spec.learned, device: Footprint(mib, FootprintSource.LEARNED, f"measured on {device}")}
        self._change_need(device, replace(self.spec, learned=learned))

    def raise_footprint(self, device: DeviceId, mib: int) -> None:
        """Lease at least `mib` on `device` from now on: a load with less ran out of memory."""
        self._change_need(device, replace(self.spec, raised={**self.spec.raised, device: mib}))

    def _change_need(self, device: DeviceId, spec: ModelSpec) -> None:
        """Take a specification that differs in the need on one device. Where possible only that option is made anew."""
        known = self.known_options
        if known is not None and known[0] is self.spec and known[3] is None and all(len(ids) == 1 for ids in known[2]):
            places = [each for each in known[1] if each.id == device and (device,) in known[2]]
            options = known[2] | {(each.id,): Option((each.id,), (need_mib(spec, (each,)),)) for each in places}
            self.known_options = (spec, known[1], options, None)
        self.spec = spec

    def check(self) -> Iterator[tuple[bool, str]]:
        """The laws about this model alone: of each whether it holds, and its text."""
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
