"""From wants to loads: builds what the planner looks at, asks it, and carries its answer out.

Wanted models are taken in one order (request priority, then who waits longest), and each plan sees the plans before it
as already carried out: their victims are gone, their models are there. So a later want can use what is left over but
can never take memory that an earlier one is freeing, and nobody is overtaken for ever.

A *claim* is how a waiter takes hold of a victim: an idle one is stopped at once; a busy one gets no new requests and is
stopped when the running ones end. Claims are made anew in every round, so a waiter that leaves frees its victims.

A remote model needs no plan: nothing has to go for it, and it is in nobody's snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

from supervisor.core.device_ledger import Holder, Lease, Phase
from supervisor.core.device_sets import places
from supervisor.core.lifecycle import SERVES, Step
from supervisor.core.planner import plan
from supervisor.core.plans import Admit, Demand, DeviceView, Evict, Hold, Option, Refuse, Resident, Snapshot, Wait
from supervisor.core.state import Record, Turn, World
from supervisor.core.types import (
    REMOTE,
    DeviceId,
    Devices,
    Generation,
    ModelId,
    RejectCode,
    StartWorker,
    State,
    StopCause,
)

RELOAD_MIB_PER_S = 1024
"""Guess of how fast a model loads before its first load was timed."""

REFUSED_RETRY_S = 30.0


@dataclass(slots=True)
class _Round:
    """One round of plans: what is there, and what earlier plans have taken of it."""

    there: dict[Holder, tuple[Resident, ...]]  # who holds memory, oldest lease first
    loading: dict[DeviceId, ModelId]
    leaving: dict[ModelId, None] = field(default_factory=dict)  # victims that will be gone
    coming: list[Resident] = field(default_factory=list)  # models that will be there


def place(world: World, turn: Turn) -> None:
    """Plan every wanted model once and carry the plans out."""
    claimed_before = [r for r in world.records.values() if r.claimed_by is not None]
    if not world.wanted and not claimed_before:
        return
    for victim in claimed_before:
        victim.claimed_by = None
    round_ = _begin(world, turn)
    for model in _order(world):
        record = world.records[model]
        record.claims = ()
        if record.spec.remote:
            _connect(world, turn, record)
        else:
            _place_one(world, turn, record, round_)
    for victim in claimed_before:
        if victim.claimed_by is not None:
            continue
        if victim.state is State.DRAINING and victim.stop_reason is None:
            world.resume(turn, victim, "the model it was to make room for is not wanted any more")
            turn.decide("resume", victim.id, victim.life.reason)
        elif victim.state is State.READY:
            world.stays(turn, victim)


def _order(world: World) -> list[ModelId]:
    def key(model: ModelId) -> tuple[int, float, int, int, ModelId]:
        head, oldest = world.queue.peek(model), world.queue.oldest(model)
        record = world.records[model]
        since = min((at for at in (record.asked_at, oldest) if at is not None), default=float("inf"))
        priority, seq = (head.priority, head.seq) if head is not None else (0, 0)
        # A model that was evicted has had its turn: its backlog, however old, comes after those it was evicted for.
        return (-priority, max(since, record.turn_ended), seq, -record.spec.priority, model)

    return sorted(world.wanted, key=key)


def _place_one(world: World, turn: Turn, record: Record, round_: _Round) -> None:
    demand = _demand(world, record)
    snapshot = _snapshot(world, round_)
    answer = plan(demand, snapshot)
    if isinstance(answer, Refuse):
        answer = _reconsider(world, turn, demand, snapshot, answer)
    only_restore = record.restore and record.asked_at is None and world.queue.count(record.id) == 0
    if only_restore and not isinstance(answer, Admit):
        # Nothing goes, and nothing is drained, for a model that nobody asks for.
        waits_for = answer.waits_for if isinstance(answer, Wait) else ()
        in_use = any(world.records[model].state in SERVES for model in waits_for)
        record.restore = isinstance(answer, Wait) and not in_use
        if not record.restore:
            turn.decide("leave", record.id, f"not loaded unasked: {answer.reason}")
        world.want(record)
        return
    _journal(turn, record, answer)
    match answer:
        case Admit(devices, need_mib, reason):
            _start(world, turn, round_, record, devices, need_mib, reason)
        case Evict(devices, need_mib, victims):
            record.claims = victims
            round_.coming.append(_promise(record, devices, need_mib))
            for model in victims:
                victim = world.records[model]
                victim.claimed_by = record.id
                round_.leaving[model] = None
                world.stop(turn, victim, StopCause.ROOM, f"evicted for {record.id}")
                turn.decide("evicted", model, f"made room for {record.id}: {answer.reason}")
        case Wait(devices, need_mib, waits_for):
            record.claims = waits_for
            if devices:
                round_.coming.append(_promise(record, devices, need_mib))
            for model in waits_for:
                round_.leaving[model] = None
                _claim(world, turn, record, world.records[model])
        case Refuse(reason):
            record.life.reason = reason
            world.reject_all(
                turn,
                record,
                RejectCode.INSUFFICIENT_MEMORY,
                f"{record.id} can't be loaded: {reason}",
                retry_after_s=REFUSED_RETRY_S,
            )
            world.want(record)


def _reconsider(world: World, turn: Turn, demand: Demand, snapshot: Snapshot, answer: Refuse) -> Refuse | Wait:
    """A refusal is for good, so one for use outside waits until loads and ends under way show in the figures."""
    held = dict.fromkeys(world.ledger.device_ids(), 0)
    for resident in snapshot.residents:
        for device in resident.devices:
            held[device] = held.get(device, 0) + resident.held_on(device)
    by_the_books = tuple(replace(view, free_mib=view.usable_mib - held[view.id]) for view in snapshot.devices)
    if isinstance(plan(demand, replace(snapshot, devices=by_the_books)), Refuse):
        return answer
    for option in demand.options:
        for device in option.devices:
            model = world.ledger.in_motion(device, turn.now)
            if model is not None:
                reason = f"{answer.reason}; waiting to see what {model} takes or gives back"
                return Wait((), option.need_mib, (), reason)
    return answer


def _claim(world: World, turn: Turn, waiter: Record, victim: Record) -> None:
    """No new requests for a busy victim, unless it is entitled to its minimum residency. The first claim counts."""
    if victim.claimed_by is not None:
        return
    mature_at = victim.ready_at + world.limits.min_residency_s
    if turn.now < mature_at and waiter.spec.priority <= victim.spec.priority:
        world.wake(mature_at, waiter.id)
        return
    victim.claimed_by = waiter.id
    if victim.state is not State.READY:
        return
    if victim.in_flight:
        reason = f"drains for {waiter.id}"
        victim.life.step(Step.DRAIN, turn.now, reason)
        turn.decide("drain", victim.id, reason)
    else:
        world.stop(turn, victim, StopCause.ROOM, f"evicted for {waiter.id}")
        turn.decide("evicted", victim.id, f"makes room for {waiter.id}")


def _start(
    world: World, turn: Turn, round_: _Round, record: Record, devices: Devices, need_mib: int, reason: str
) -> None:
    _begin_life(turn, record, devices, reason)
    world.ledger.begin(record.holder, devices, need_mib)
    world.want(record)
    round_.there[record.holder] = (_promise(record, devices, need_mib, Hold.STARTING),)
    round_.loading.update(dict.fromkeys(devices, record.id))
    turn.emit(StartWorker(record.id, record.generation, devices, need_mib))


def _connect(world: World, turn: Turn, record: Record) -> None:
    _begin_life(turn, record, REMOTE, "connecting")
    world.want(record)
    turn.emit(StartWorker(record.id, record.generation, REMOTE, 0))


def _begin_life(turn: Turn, record: Record, devices: Devices, reason: str) -> None:
    record.generation = Generation(record.generation + 1)
    record.devices = devices
    record.exited = False
    record.crash = None
    record.stop_reason = None
    record.life.step(Step.START, turn.now, reason)


def _journal(turn: Turn, record: Record, answer: Admit | Evict | Wait | Refuse) -> None:
    """Record a plan once, however often it is made again with only its numbers changed."""
    kind = type(answer).__name__.lower()
    others = answer.victims if isinstance(answer, Evict) else answer.waits_for if isinstance(answer, Wait) else ()
    gist = f"{kind} {' '.join(others)}"
    if gist != record.last_plan or isinstance(answer, Admit):
        record.last_plan = gist
        turn.decide(kind, record.id, answer.reason)


def _promise(record: Record, devices: Devices, need_mib: int, hold: Hold = Hold.RESERVED) -> Resident:
    held_mib = (need_mib,) * len(devices)
    return Resident(record.id, record.spec.type, record.spec.priority, devices, held_mib, hold)


def _demand(world: World, record: Record) -> Demand:
    spec = record.spec
    options = (
        Option(tuple(device.id for device in place), record.need_on(place))
        for place in places(spec, world.ledger.devices())
    )
    return Demand(record.id, spec.type, spec.priority, tuple(options))


def _begin(world: World, turn: Turn) -> _Round:
    there: dict[Holder, tuple[Resident, ...]] = {}
    loading: dict[DeviceId, ModelId] = {}
    for lease in world.ledger.leases():
        holder = lease.holder
        if holder not in there:
            record = world.records[holder[0]]
            there[holder] = _residents(world, turn, record, world.ledger.leases_of(holder))
        if lease.phase is Phase.STARTING:
            loading[lease.device] = holder[0]
    return _Round(there, loading)


def _snapshot(world: World, round_: _Round) -> Snapshot:
    residents = list(round_.coming)
    surplus = dict.fromkeys(world.ledger.device_ids(), 0)  # by device: being freed, less what is promised of it
    leaving: list[tuple[Resident, DeviceId]] = []
    for promised in round_.coming:
        for device in promised.devices:
            surplus[device] -= promised.held_on(device)
    for resident in chain.from_iterable(round_.there.values()):
        if resident.model in round_.leaving:
            for device in resident.devices:
                surplus[device] = surplus.get(device, 0) + resident.held_on(device)
                leaving.append((resident, device))
        else:
            residents.append(resident)
    views = tuple(_view(world, device, mib, round_.loading.get(device)) for device, mib in surplus.items())
    for resident, device in leaving:  # what they return beyond what is promised is on its way to anybody
        if (mib := min(resident.held_on(device), surplus[device])) > 0:
            surplus[device] -= mib
            residents.append(replace(resident, hold=Hold.STOPPING, devices=(device,), held_mib=(mib,)))
    return Snapshot(views, tuple(residents), world.policy)


def _view(world: World, device: DeviceId, surplus_mib: int, loading: ModelId | None) -> DeviceView:
    view = world.ledger.view(device)
    blocked = view.blocked
    if blocked is None and loading is not None and world.limits.loads_per_device <= world.ledger.starting(device):
        blocked = f"{loading} is loading"
    # What is being freed for an earlier waiter isn't here yet; what it was promised isn't gone yet.
    free = view.free_mib + min(0, surplus_mib)
    return DeviceView(device, view.total_mib, view.usable_mib, free, blocked)


def _residents(world: World, turn: Turn, record: Record, leases: tuple[Lease, ...]) -> tuple[Resident, ...]:
    """The worker of these leases: as one, or device by device where it goes on each at its own time."""
    returning = [lease for lease in leases if lease.phase is Phase.RETURNING or lease.holder != record.holder]
    parts = [(lease,) for lease in returning] if returning else [leases]
    return tuple(_resident(world, turn, record, part, is_gone=bool(returning)) for part in parts)


def _resident(world: World, turn: Turn, record: Record, leases: tuple[Lease, ...], *, is_gone: bool) -> Resident:
    spec = record.spec
    idle_s = max(0.0, turn.now - record.last_used)
    match record.state:
        case _ if is_gone:
            hold = Hold.STOPPING
        case State.STARTING:
            hold = Hold.STARTING
        case State.STOPPING:
            hold = Hold.STOPPING
        case _ if record.pinned and not record.retired:
            hold = Hold.PINNED
        case _ if record.in_flight or record.state is State.DRAINING:
            hold = Hold.BUSY
        case _:
            hold = _young(world, turn, record)
    held_mib = tuple(lease.held_mib for lease in leases)
    reload_s = record.load_s if record.load_s is not None else max(1.0, sum(held_mib) / RELOAD_MIB_PER_S)
    devices = tuple(lease.device for lease in leases)
    in_flight = len(record.in_flight)
    return Resident(record.id, spec.type, spec.priority, devices, held_mib, hold, idle_s, reload_s, in_flight)


def _young(world: World, turn: Turn, record: Record) -> Hold:
    """An idle model keeps its place while it is below its minimum residency and still in demand."""
    mature_at, quiet_at = record.ready_at + world.limits.min_residency_s, record.last_used + world.limits.linger_s
    if turn.now >= mature_at:
        return Hold.NONE
    if turn.now < quiet_at:
        world.wake(quiet_at, record.id)
        return Hold.YOUNG
    if world.queue.count(record.id) > 0:
        world.wake(mature_at, record.id)
        return Hold.YOUNG
    return Hold.NONE
