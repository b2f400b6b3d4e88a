"""A world for the scheduler: devices with memory, workers that load and exit, clients that come and go.

Time is simulated; what the scheduler orders is carried out by `World.run`, each after its own delay. Used by the
scenario tests and, with random delays and faults, by the stateful test.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.admission.limits import Account
from supervisor.core.admission.waiting import forecast, wait_reason
from supervisor.core.decisions import DecisionLog
from supervisor.core.demand import NORMAL, Demand
from supervisor.core.effects import AskClients, CutRequest, Decided, Dispatch, Effect, Reject, StartWorker, StopWorker
from supervisor.core.events import (
    ClientsRead,
    Configured,
    DeviceSample,
    Event,
    LeaseRequested,
    MemorySampled,
    RequestArrived,
    RequestFinished,
    Tick,
    WorkerExited,
    WorkerReady,
    WorkerSample,
    WorkerUnkillable,
)
from supervisor.core.planning.placement import SHORTLIST_ABOVE
from supervisor.core.planning.planner import plan
from supervisor.core.planning.plans import Admit, Evict, EvictionBlock, LoadDemand
from supervisor.core.planning.snapshots import snapshot
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import (
    PARTNER,
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
    Policy,
    TicketId,
    WorkerState,
)
from supervisor.engine.recording import Recording, event_line, replay
from supervisor.engine.sampling import IDLE_S, IMPATIENT_S
from tests.support.counts import times

SEGMENT = 200  # events after which a recording begins anew, from the state as it is then
CHECKED = times(8, 1)  # of so many readings that say the same, the laws are checked after one
_WORDS = {"a", "large"}  # names that messages use as words
Key = tuple[ModelId, Generation]
GPU = DeviceId("gpu0")


def model(name: str, mib: int, kind: str = "llm", priority: int | None = None, **more: object) -> ModelSpec:
    default = {"asr": 300, "tts": 200, "image": 150, "vision": 130, "embedding": 120, "llm": 100}[kind]
    return ModelSpec(
        id=ModelId(name),
        type=kind,
        priority=default if priority is None else priority,
        footprint=Footprint(mib, FootprintSource.EXPLICIT),
        definition=str(more.pop("definition", name)),
        footprint_key=name,
        **more,  # type: ignore[arg-type]
    )


@dataclass
class Other:
    """A partner's process, whose lease may be over: what it takes on each of its devices, and what it may take."""

    where: Devices
    may_take: int
    takes: int = 0


@dataclass
class World:
    """A simulated machine. `load_s`, `exit_s` and `return_s` may be changed at any time.

    `gradual`: a worker takes its memory bit by bit while it loads. `blind`: readings tell neither what a worker takes nor
    what others do. `stale`: devices that can't be read now. `beyond`: what a model takes on a device besides its lease.
    `read`: the clients that hold their answers up, and how many bytes each has read.
    """

    totals: dict[DeviceId, int] = field(default_factory=lambda: {GPU: 16384})
    margin: int = 512
    returns_at_exit: bool = False
    load_s: float = 2.0
    exit_s: float = 0.2
    return_s: float = 0.1
    now: float = 1000.0
    outside: dict[DeviceId, int] = field(default_factory=dict)
    gradual: bool = False
    blind: bool = False
    stale: set[DeviceId] = field(default_factory=set)
    beyond: dict[tuple[str, DeviceId], int] = field(default_factory=dict)
    read: dict[TicketId, int] = field(default_factory=dict)
    crash_on_start: Callable[[ModelId], Crash | None] = lambda _model: None
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.admission)
        self.decisions = DecisionLog()
        self.recording = Recording(self.scheduler, self.now).take()  # the first line of a recording
        self.happened: list[tuple[float, Event, list[Effect]]] = []  # its others, to be
        self.using: dict[
            Key, dict[DeviceId, int]
        ] = {}  # really taken on each device, also after the exit until it is back
        self.alive: dict[Key, Devices] = {}
        self.leased: dict[Key, dict[DeviceId, int]] = {}  # what each living worker may take
        self.loading: dict[Key, float] = {}  # since when
        self.stopping: set[Key] = set()
        self.others: dict[ModelId, Other] = {}
        self.immortal: set[Key] = set()
        self.starts: list[ModelId] = []
        self.dispatched: dict[TicketId, Key] = {}
        self.rejected: dict[TicketId, Reject] = {}
        self.cut: list[TicketId] = []
        self.open: dict[TicketId, ModelId] = {}
        self._sample_at = self.now
        self._said: tuple[Sequence[DeviceSample], Sequence[WorkerSample]] | None = None  # by the last event
        self._same = 0  # readings that said the same until now
        self.effects: list[Effect] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = count()
        self._tickets = count(1)

    # driving

    def configure(self, *models: ModelSpec, limits: Limits | None = None, policy: Policy | None = None) -> None:
        devices = tuple(
            DeviceSpec(device, total, self.margin, returns_at_exit=self.returns_at_exit)
            for device, total in self.totals.items()
        )
        self.post(Configured(models, devices, limits or Limits(), policy or Policy()))
        self.sample()

    def request(self, name: str, priority: int = NORMAL, accounts: tuple[Account, ...] = (), **demand: Any) -> TicketId:
        ticket = TicketId(f"t{next(self._tickets)}")
        self.open[ticket] = ModelId(name)
        self.post(RequestArrived(ticket, ModelId(name), Demand(priority, accounts=accounts, **demand)))
        return ticket

    def lease(self, name: str, mib: int, *, ttl_s: float = 1e6, pid: int | None = None, **more: object) -> None:
        """A partner asks for memory. With a `pid` its use is measured."""
        waits, gpus, devices = bool(more.get("waits")), int(more.get("gpus", 1)), tuple(more.get("devices", ()))  # type: ignore[call-overload]
        footprint = Footprint(mib, FootprintSource.EXPLICIT)
        spec = ModelSpec(ModelId(name), PARTNER, 100, footprint, devices=devices, gpus=gpus, pin=True)
        self.post(LeaseRequested(spec, Partner(name, ttl_s, waits, pid)))

    def finish(self, ticket: TicketId, tokens: int = 0, *, served: bool = True) -> None:
        if self.open.pop(ticket, None) is not None:
            self.dispatched.pop(ticket, None)
            self.post(RequestFinished(ticket, tokens, served))

    def post(self, event: Event) -> None:
        if len(self.happened) >= SEGMENT:
            self.recording, self.happened = Recording(self.scheduler, self.now).take(), []
        event, effects = self.handled(event)
        self.decisions.note(effects, self.now)
        self.happened.append((self.now, event, effects))
        for effect in effects:
            self.effects.append(effect)
            self._carry_out(effect)
        if self._is_to_check(event, effects):
            self.check()

    def _is_to_check(self, event: Event, effects: list[Effect]) -> bool:
        """Of readings that say the same, and of which nothing comes, only some are: nothing but the time is another."""
        said = (event.devices, event.workers) if isinstance(event, MemorySampled) else None
        is_same = said is not None and said == self._said and not effects
        self._said, self._same = said, self._same + 1 if is_same else 0
        return self._same % CHECKED == 0

    def handled(self, event: Event) -> tuple[Event, list[Effect]]:
        """What the scheduler handles, and what comes of it."""
        return event, self.scheduler.handle(event, self.now)

    def replays(self) -> bool:
        """Does the recording of the last events give the same again?"""
        lines = [*self.recording, *(event_line(*each) for each in self.happened)]
        return all(replayed.is_same for replayed in replay(lines))

    def sample(self) -> None:
        self._sample_at = self.now + IDLE_S
        self.post(self.reading())

    def reading(self) -> MemorySampled:
        self.now += 1e-6  # no two begin at the same time
        for key, since in self.loading.items():
            part = min(1.0, (self.now - since) / self.load_s) if self.load_s else 1.0
            for device, mib in self.leased[key].items():
                self.using[key][device] = max(self.using[key][device], int(mib * part))
        devices = []
        for device, total in self.totals.items():
            outside = self.outside.get(device, 0) + self._unseen(device)
            used = sum(other.takes for name, other in self.others.items() if device in other.where and self._seen(name))
            used += sum(self._used(key, device) for key, parts in self.using.items() if device in parts) + outside
            known = None if self.blind else outside
            devices.append(DeviceSample(device, max(0, total - used), device in self.stale, known))
        workers = tuple(
            WorkerSample(*key, device, None if self.blind else self._used(key, device))
            for key, where in self.alive.items()
            for device in where
        )
        partners = tuple(
            WorkerSample(name, self.scheduler.state.models[name].generation, device, other.takes)
            for name, other in self.others.items()
            if self._seen(name)
            for device in other.where
        )
        return MemorySampled(tuple(devices), workers + partners, self.now)

    def _seen(self, name: ModelId) -> bool:
        """Is what this partner takes measured as its own?"""
        known = self.scheduler.state.models.get(name)
        is_held = known is not None and known.partner is not None and known.state is WorkerState.READY
        return is_held and known.partner.pid is not None and not self.blind  # type: ignore[union-attr]

    def _unseen(self, device: DeviceId) -> int:
        """What partners take there that counts as used outside."""
        return sum(other.takes for name, other in self.others.items() if device in other.where and not self._seen(name))

    def _used(self, key: Key, device: DeviceId) -> int:
        return self.using[key][device] + self.beyond.get((key[0], device), 0) if key in self.using else 0

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._seq), action))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass: due actions, ticks when the scheduler asks for them, samples as often as a daemon takes them.

        At most until that is so.
        """
        end = self.now + seconds
        self._sample_at = min(self._sample_at, self.now + IMPATIENT_S)
        while True:
            if self.scheduler.is_impatient():
                self._sample_at = min(self._sample_at, self.now + IMPATIENT_S)
            deadline = self.scheduler.deadline(self.now)
            at = min(
                max(self.now, self._sample_at), max(self.now, deadline), self._due[0][0] if self._due else end, end
            )
            if until():
                return
            self.now = max(self.now, at)
            if at >= end:
                return
            if self._due and self._due[0][0] <= at:
                heapq.heappop(self._due)[2]()
            elif deadline <= at:
                before = deadline
                self.post(Tick())
                if self.scheduler.deadline(self.now) <= before:
                    self.now += 1e-6  # a tick that changes nothing must not stop the clock
            else:
                self.sample()

    # what the scheduler orders

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartWorker(name, generation, where, parts):
                key = (name, generation)
                assert key not in self.alive
                assert all(alive != name for alive, _ in self.alive), f"two workers of {name}"
                self.starts.append(name)
                self.alive[key] = where
                self.leased[key] = dict(zip(where, parts, strict=True))
                self.using[key] = {device: 0 if self.gradual else mib for device, mib in self.leased[key].items()}
                self.loading[key] = self.now
                crash = self.crash_on_start(name)
                self.later(self.load_s, lambda: self._loaded(key, crash))
            case StopWorker(name, generation):
                key = (name, generation)
                assert key in self.alive
                if key not in self.stopping:
                    self.stopping.add(key)
                    self.later(self.exit_s, lambda: self._exited(key, None))
            case Dispatch(ticket, name, generation):
                assert ticket in self.open
                assert ticket not in self.dispatched, "an upstream sees each request once"
                assert self.open[ticket] == self.scheduler.state.models[name].queue_key
                assert (name, generation) in self.alive
                assert (name, generation) not in self.stopping
                self.dispatched[ticket] = (name, generation)
            case Reject(ticket):
                name = self.open.pop(ticket, None)
                assert name is not None, "a request ends once"
                assert ticket not in self.dispatched
                assert name in _WORDS or not re.search(rf"\b{re.escape(name)}\b", effect.message), (
                    "a client may know its model by another name"
                )
                self.rejected[ticket] = effect
            case CutRequest(ticket):
                self.cut.append(ticket)
                self.later(0.0, lambda: self.finish(ticket))
            case AskClients(name, generation):
                held_up = {t: n for t, n in self.read.items() if self.dispatched.get(t) == (name, generation)}
                self.later(0.0, lambda: self.post(ClientsRead(name, generation, held_up)))
            case Decided("lease_granted", name):
                assert name is not None
                leases = self.scheduler.state.ledger.leases_of(self.scheduler.state.models[name].holder)
                self.others[name] = Other(tuple(lease.device for lease in leases), leases[0].mib)
            case Decided("lease_ended", name):
                if name in self.others:
                    self.others[name].may_take = 0
            case _:
                pass

    def _loaded(self, key: Key, crash: Crash | None) -> None:
        if key in self.alive and key not in self.stopping:
            for device, mib in self.leased[key].items():
                self.using[key][device] = max(self.using[key][device], mib)
            self.loading.pop(key, None)
            if crash is not None:
                self._exited(key, crash)
            else:
                self.post(WorkerReady(*key))

    def crash(self, name: str, crash: Crash | None = None) -> None:
        key = next(key for key in self.alive if key[0] == name)
        for ticket in [ticket for ticket, where in self.dispatched.items() if where == key]:
            self.later(0.0, lambda ticket=ticket: self.finish(ticket))  # type: ignore[misc]
        self._exited(key, crash)

    def not_to_be_killed(self, key: Key) -> None:
        self.immortal.add(key)
        self.post(WorkerUnkillable(*key, "still there 5 s after SIGKILL"))

    def dies_at_last(self, key: Key) -> None:
        self.immortal.discard(key)
        self._exited(key, None)

    def _exited(self, key: Key, crash: Crash | None) -> None:
        if key not in self.alive or key in self.immortal:
            return
        del self.alive[key], self.leased[key]
        self.loading.pop(key, None)
        self.stopping.discard(key)
        if self.returns_at_exit:
            self.using.pop(key)
        else:
            self.later(self.return_s, lambda: self.using.pop(key, None) and None)
        self.post(WorkerExited(*key, crash))

    # laws

    def check(self) -> None:
        """What must hold after every event."""
        state = self.scheduler.state
        state.check()
        for device, total in self.totals.items():
            # Unseen, what a worker that has ended still holds looks as if a partner took what it may.
            hides = self.blind and any(device in o.where and o.takes < o.may_take for o in self.others.values())
            taken = sum(
                max(parts[device], self.leased.get(key, parts)[device])
                for key, parts in self.using.items()
                if device in parts and not (hides and key not in self.alive)
            )
            taken += sum(max(o.may_take, o.takes) for o in self.others.values() if device in o.where)
            assert taken + self.outside.get(device, 0) <= max(total, self.outside.get(device, 0)), "over-committed"
        queued = {ticket for ticket in self.open if ticket in state.queue}
        assert queued | set(self.dispatched) == set(self.open), "a waiter was lost"
        assert not queued & set(self.dispatched)
        for waiting in {
            self.open[ticket] for ticket in queued
        }:  # what they wait for can be told, and is another's doing
            model = state.models[waiting]
            assert waiting not in wait_reason(state, model).others
            ready = any(replica.state is WorkerState.READY for replica in state.replicas(model))
            assert forecast(state, model, self.now).text or ready
        assert set(self.alive) == {
            m.holder for m in state.models.values() if m.has_worker and not m.exited and m.partner is None
        }
        self._check_that_nobody_waits_in_vain()

    def _check_that_nobody_waits_in_vain(self) -> None:
        """Plan everybody from scratch: whoever could start now, or could after idle models went, would have been planned."""
        state = self.scheduler.state
        if state.handing_over:
            return
        for model_id in state.wanted:
            model, key = state.models[model_id], state.wanted.key(model_id)
            devices = state.ledger.devices()
            options = tuple(model.options(devices).values())
            seen = snapshot(state, self.now, state.ledger.device_ids(), key)
            spread = model.spread(devices)
            answer = plan(LoadDemand(model_id, model.spec.type, model.spec.priority, options, spread), seen)
            unasked = model.asked_at is None and not state.waiting_for(model)
            going = {each.model for each in seen.residents if each.block is EvictionBlock.STOPPING}
            assert not isinstance(answer, Admit), (
                f"{model_id} could start: {answer}; it has {state.wanted.place(model_id)}"
            )
            assert (
                not isinstance(answer, Evict)
                or unasked
                or any(
                    key < other for gone in going for other in state.wanted.claimants(gone)
                )  # a later one made it go
                or (
                    model.spec.gpus > 1 and len(options) > SHORTLIST_ABOVE
                )  # it looks closely at the most promising sets only
                or {state.models[victim].state for victim in state.claims(model_id)} == {WorkerState.STOPPING}
                or any(state.ledger.has_unsampled_worker(device) for device in answer.devices)
            ), f"{model_id} could have room: {answer}; it has {state.wanted.place(model_id)}"

    def state(self, name: str) -> str:
        return self.scheduler.state.models[ModelId(name)].state.value

    def loaded(self) -> set[str]:
        return {r.id for r in self.scheduler.state.models.values() if r.state.value == "ready"}

    def reasons(self, name: str) -> list[tuple[str, str]]:
        return [(d.kind, d.reason) for d in self.decisions.last(ModelId(name))]

    def decided(self) -> list[Decided]:
        return [effect for effect in self.effects if isinstance(effect, Decided)]


def guessed(name: str, mib: int, **more: object):
    """A model whose footprint is an estimate, so that measurements count."""
    spec = model(name, mib, **more)
    object.__setattr__(spec, "footprint", Footprint(mib, FootprintSource.COMPUTED))
    return spec


def rivals(**more: object) -> World:
    """A world of `a` and `b`, which don't fit together and load in four seconds. `more`: of `b`."""
    world = World(load_s=4.0)
    world.configure(model("a", 9000), model("b", 9000, **more))
    return world


def load(world: World, name: str) -> None:
    ticket = world.request(name)
    world.run(world.load_s + 1)
    assert ticket in world.dispatched
    world.finish(ticket)
    world.run(1)


def record(world: World, name: str):
    return world.scheduler.state.models[ModelId(name)]
