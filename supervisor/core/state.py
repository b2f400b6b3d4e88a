"""What the scheduler remembers: one `ModelState` per configured model, the ledger, the queue, the timers.

One `Scheduler` owns all of it and changes it only inside `handle()`. Each such call is a `Step`: the time, and the
effects collected so far.

What belongs together is one frozen value. A comment beside each field names the condition under which it is set, and
`SchedulerState.check()` asserts these conditions. Tests run it after every event; the daemon never does.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from supervisor.core.admission import AdmissionPolicy
from supervisor.core.device_ledger import Holder
from supervisor.core.device_sets import need_mib, usable_mib
from supervisor.core.effects import Decided, Effect
from supervisor.core.ledger import Ledger
from supervisor.core.queue import AdmissionQueue
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
    Limits,
    ModelId,
    ModelSpec,
    Partner,
    StopCause,
    TicketId,
    WorkerState,
)

OUT_OF_MEMORY_EXTRA = 1.25
"""Factor on the footprint for the one retry after a start that ran out of memory."""

NEVER_STARTED = Generation(0)
STORY_LENGTH = 40


@dataclass(slots=True)
class Step:
    """One call of `Scheduler.handle`."""

    now: float
    effects: list[Effect] = field(default_factory=list)

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def decide(self, kind: str, model_id: ModelId | None, reason: str) -> None:
        self.effects.append(Decided(kind, model_id, reason))


class Life:
    """A model's state, when and why it was entered, and the last transitions. Only `lifecycle.advance` changes it."""

    __slots__ = ("_story", "reason", "since", "state")

    def __init__(self, now: float) -> None:
        self.state = WorkerState.STOPPED
        self.since = now
        self.reason = "never loaded"
        self._story: deque[tuple[float, str, WorkerState, str]] = deque(maxlen=STORY_LENGTH)

    def enter(self, state: WorkerState, trigger: str, now: float, reason: str) -> None:
        """Be in `state` from now on."""
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
    urgent_since: float | None = None  # set iff a model of higher priority waits for its memory: since then
    look_at: float | None = None  # set iff requests whose clients don't read are cut earlier: the next look at them
    read: Mapping[TicketId, int] = field(default_factory=dict)  # what the clients that held it up had read at the last

    @property
    def is_ordered(self) -> bool:
        return self.cause is not StopCause.ROOM


@dataclass(frozen=True, slots=True)
class Wish:
    """Who wants the model loaded besides queued requests. At least one of the fields is set."""

    asked_at: float | None = None  # set iff an operator asked for it: since then
    restore: bool = False  # set iff it was loaded or is preloaded: load it only if nothing has to go for it


@dataclass(frozen=True, slots=True)
class Change:
    """What a new configuration makes of the model when its worker is gone."""

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
    """One model: its worker's life, its requests, and who wants or claims it."""

    spec: ModelSpec
    life: Life
    generation: Generation = NEVER_STARTED  # of its last start
    worker: Worker | None = None  # set iff STARTING, READY, DRAINING or STOPPING
    in_flight: dict[TicketId, None] = field(default_factory=dict)  # never empty while DRAINING; empty without a worker
    drain: Drain | None = None  # set iff DRAINING
    claimed_by: ModelId | None = None  # set iff that model waits for this one's memory; the first claim counts
    claims: tuple[ModelId, ...] = ()  # the models whose memory it waits for; none unless wanted
    wish: Wish | None = None  # set iff not only requests want it; never while READY
    change: Change | None = None  # set iff a reload waits for the end of its worker, or of the last of its leases
    crashes: CrashHistory = field(default_factory=CrashHistory)
    partner: Partner | None = None  # set iff it is no model: somebody else's process has the memory
    pin: bool | None = None  # set iff an operator pinned or unpinned it; None: as configured
    keep_alive_at: float | None = None  # set iff a timer will see whether it has been idle for too long; only READY
    last_used: float = 0.0
    ready_at: float = 0.0  # when it last became ready
    stopped_at: float = float("-inf")  # when its worker was last told to stop
    load_s: float | None = None  # set iff it was loaded before as it is specified now: how long the last load took
    last_plan: str = ""  # kind and models of the last plan, so that each is told only once

    @property
    def id(self) -> ModelId:
        return self.spec.id

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
        return None if self.wish is None else self.wish.asked_at

    @property
    def restore(self) -> bool:
        return self.wish is not None and self.wish.restore

    @property
    def pinned(self) -> bool:
        """Is it never to be evicted?"""
        return self.spec.pin if self.pin is None else self.pin

    @property
    def removed(self) -> bool:
        """Is it no longer configured? It is forgotten when nothing of it is left."""
        return self.change is not None and self.change.spec is None

    def ask(self, now: float) -> float:
        """An operator wants it loaded. Returns since when."""
        since = now if self.asked_at is None else self.asked_at
        self.wish = Wish(since, self.restore)
        return since

    def give_up(self) -> None:
        """The operator's wish is over."""
        self.wish = Wish(restore=True) if self.restore else None

    def want_back(self) -> None:
        """Load it whenever nothing has to go for it."""
        self.wish = Wish(self.asked_at, restore=True)

    def set_worker(self, *, answering: bool | None = None, stuck: bool | None = None) -> None:
        """Change what is known of its worker. It must have one."""
        worker = self.worker
        assert worker is not None, f"{self.id} has no worker"
        self.worker = replace(
            worker,
            answering=worker.answering if answering is None else answering,
            stuck=worker.stuck if stuck is None else stuck,
        )

    def lease_mib(self, device_set: Sequence[DeviceSpec]) -> int:
        """What to lease on each device of the set. The one retry after running out of memory gets more, if there is more."""
        mib = need_mib(self.spec, device_set)
        if not self.crashes.oom_retried:
            return mib
        return max(mib, min(int(mib * OUT_OF_MEMORY_EXTRA), usable_mib(device_set)))

    def specify(self, spec: ModelSpec) -> None:
        """Be this from now on. How long another model or context took to load says nothing about it."""
        if spec.footprint_key != self.spec.footprint_key:
            self.load_s = spec.load_s
        self.spec = spec

    def learn(self, device: DeviceId, mib: int) -> None:
        """Use `mib` for the next load on `device`."""
        learned = {**self.spec.learned, device: Footprint(mib, FootprintSource.LEARNED, f"measured on {device}")}
        self.spec = replace(self.spec, learned=learned)

    def check(self) -> Iterator[tuple[bool, str]]:
        """The laws about this model alone: whether each holds, and its words."""
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
            waits_for_model = drain.look_at is not None or drain.urgent_since is not None
            yield not (waits_for_model and drain.is_ordered), "an ordered drain looks at no clients and no waiter"
            yield drain.is_ordered or self.claimed_by is not None, "drained for nobody"
        yield self.partner is None or not self.in_flight, "a partner has no requests"
        yield self.wish is None or self.wish != Wish(), "an empty wish"
        yield self.wish is None or state is not WorkerState.READY, "wished for although it is ready"
        yield self.keep_alive_at is None or state is WorkerState.READY, "an idle timer only while READY"
        if crashes.retry_at is None:
            yield state is not WorkerState.BACKOFF, "BACKOFF without an end"
        else:
            yield state in {WorkerState.BACKOFF, WorkerState.FAILED}, "a time to retry only after a crash"
        yield crashes.last is None or worker is None, "a start forgets the last crash"
        if state in {WorkerState.BACKOFF, WorkerState.FAILED}:
            yield crashes.last is not None and bool(crashes.times or crashes.refusals), "failed without a crash"
        if self.change is not None and (worker is not None or not self.removed):
            yield state in {WorkerState.DRAINING, WorkerState.STOPPING}, "a change waits for a worker that goes"


@dataclass(slots=True)
class SchedulerState:
    """Everything the scheduler decides on."""

    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    ledger: Ledger = field(default_factory=Ledger)
    queue: AdmissionQueue = field(init=False)
    models: dict[ModelId, ModelState] = field(default_factory=dict)
    tickets: dict[TicketId, ModelId] = field(default_factory=dict)  # the dispatched ones
    wanted: dict[ModelId, None] = field(default_factory=dict)  # models to be loaded as soon as there is room
    timers: list[tuple[float, ModelId]] = field(default_factory=list)  # a heap
    armed: set[tuple[float, ModelId]] = field(default_factory=set)  # what is in it: plans arm the same timer repeatedly
    last_forgotten: Generation = NEVER_STARTED  # no generation of a forgotten model was later
    shutting_down: bool = False
    handing_over: bool = False  # a successor is to get the workers: no plans are made

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(self.admission)

    @property
    def limits(self) -> Limits:
        return self.admission.limits

    def wake(self, at: float, model_id: ModelId) -> None:
        """Look at the model again at `at`, if that ever comes. Waking too often is harmless."""
        if at < math.inf and (at, model_id) not in self.armed:
            self.armed.add((at, model_id))
            heapq.heappush(self.timers, (at, model_id))

    def next_wake(self) -> float:
        """When the next timer fires; infinity when none does."""
        return self.timers[0][0] if self.timers else math.inf

    def due(self, now: float) -> list[ModelId]:
        """Take out the timers that are due; their models, each once."""
        if self.next_wake() > now:
            return []
        due: dict[ModelId, None] = {}
        while self.next_wake() <= now:
            timer = heapq.heappop(self.timers)
            self.armed.remove(timer)
            due[timer[1]] = None
        return list(due)

    def current(self, model_id: ModelId, generation: Generation) -> ModelState | None:
        """The model, unless the message is about an older worker or a forgotten model."""
        model = self.models.get(model_id)
        return model if model is not None and model.generation == generation and model.has_worker else None

    def update_wanted(self, model: ModelState) -> None:
        """Keep `wanted` up to date: this model isn't loaded, may be loaded, and somebody waits for it."""
        if (
            model.life.state is WorkerState.STOPPED
            and not model.removed
            and not self.shutting_down
            and (model.wish is not None or self.queue.count(model.id) > 0)
        ):
            self.wanted[model.id] = None
        else:
            self.wanted.pop(model.id, None)
            model.claims = ()

    def check(self) -> None:
        """Assert that the whole state is legal; the error tells the worker's story."""
        self.ledger.check()
        self.queue.check()
        assert self.tickets == {ticket: m.id for m in self.models.values() for ticket in m.in_flight}
        assert len(self.timers) == len(self.armed) <= 20 * len(self.models) + 20, "timers pile up"
        assert self.wanted.keys() <= self.models.keys()
        for model_id, generation in {lease.holder for lease in self.ledger.leases()}:
            assert generation <= self.models[model_id].generation, f"{model_id}: a lease of a worker that never started"
        for model in self.models.values():
            for holds, law in (*model.check(), *self._check_model(model)):
                assert holds, f"{model.id} is {model.state}: {law}; {model}; story:\n{model.life.story()}"

    def _check_model(self, model: ModelState) -> Iterator[tuple[bool, str]]:
        state, queued = model.state, self.queue.count(model.id)
        if state is WorkerState.READY:
            served = not (model.answering and queued) or self.admission.is_full(model)
            yield served, "a queued request could be served"
        if state is WorkerState.FAILED or model.removed or model.stuck or self.shutting_down:
            yield not queued, "a request waits for what can't come"
        may = state is WorkerState.STOPPED and not model.removed and not self.shutting_down
        yield (model.id in self.wanted) == (may and bool(queued or model.wish)), "wanted iff it is to be loaded"
        yield not model.claims or model.id in self.wanted, "only a wanted model claims others"
        yield not (model.claims and self.handing_over), "claims although a successor plans"
        if model.claimed_by is not None:
            claimant = self.models.get(model.claimed_by)
            yield claimant is not None and model.id in claimant.claims, "claimed by a model that does not wait for it"
        drain = model.drain
        drained_at, look_at = (None, None) if drain is None else (drain.until, drain.look_at)
        for at in (model.crashes.retry_at, drained_at, look_at, model.keep_alive_at):
            yield at in {None, math.inf} or (at, model.id) in self.armed, "a time that no timer waits for"
        if model.worker is not None and not model.exited:
            leased = tuple(lease.device for lease in self.ledger.leases_of(model.holder))
            yield leased == (() if model.spec.remote else model.devices), "a lease on each of its devices"
        elif state is not WorkerState.STOPPING and model.removed:
            yield self.ledger.holds_any(model.id), "removed, and nothing of it is left"
