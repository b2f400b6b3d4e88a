"""From wishes to loads: builds what the planner looks at, asks it, and carries its answer out.

The admission policy orders the wanted models, and each plan sees the plans before it as already carried out: their
victims are gone, their models are loaded. So a later model can use what is left over but can never take memory that is
being freed for an earlier one, and none is overtaken forever.

A *claim* is how a waiter takes hold of a victim: an idle one is stopped at once; a busy one gets no new requests and is
stopped when the running ones end, or when `draining` cuts them. Claims are made anew in every round, so a waiter that
leaves frees its victims.

A remote model needs no plan: nothing has to go for it, and it is in nobody's snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

from supervisor.core import partners
from supervisor.core.device_ledger import Holder, Lease, Phase
from supervisor.core.device_sets import device_sets
from supervisor.core.dispatch import keep_loaded, reject_all, resume
from supervisor.core.draining import drain_claimed
from supervisor.core.effects import StartWorker
from supervisor.core.lifecycle import Trigger, advance
from supervisor.core.planner import plan
from supervisor.core.plans import (
    Admit,
    DeviceView,
    Evict,
    EvictionBlock,
    LoadDemand,
    Option,
    Plan,
    Refuse,
    Resident,
    Snapshot,
    Wait,
)
from supervisor.core.state import ModelState, SchedulerState, Step
from supervisor.core.termination import stop_now
from supervisor.core.types import ASKED, REMOTE, SERVES, DeviceId, Devices, ModelId, RejectCode, StopCause, WorkerState

RELOAD_MIB_PER_S = 1024
"""Guess of how fast a model loads before its first load was timed."""

REFUSED_RETRY_S = 30.0


@dataclass(slots=True)
class _Round:
    """One round of plans: what is loaded, and what earlier plans have taken of it."""

    loaded: dict[Holder, tuple[Resident, ...]]  # who holds memory, oldest lease first
    loading: dict[DeviceId, ModelId]
    leaving: dict[ModelId, None] = field(default_factory=dict)  # victims that will be gone
    coming: list[Resident] = field(default_factory=list)  # models that will be loaded


def place_wanted(state: SchedulerState, step: Step) -> None:
    """Plan every wanted model once and carry the plans out."""
    claimed_before = [model for model in state.models.values() if model.claimed_by is not None]
    if not state.wanted and not claimed_before:
        return
    for victim in claimed_before:
        victim.claimed_by = None
    round_ = _begin(state, step)
    wanted = [state.models[model_id] for model_id in state.wanted]
    if state.handing_over:  # who waits goes on waiting: the successor plans
        for model in wanted:
            model.claims = ()
        wanted = []
    wanted.sort(key=lambda model: (state.admission.rank_model(model, state.queue, step.now), model.id))
    for model in wanted:
        model.claims = ()
        if model.spec.remote:
            _start(state, step, model, REMOTE, 0, "connecting")
        else:
            _place(state, step, model, round_)
    for victim in claimed_before:
        if victim.claimed_by is None:
            _release(state, step, victim)
    drain_claimed(state, step, wanted)


def _release(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Nobody claims it any more: it serves again, unless it has to go anyway."""
    if victim.drain is not None and not victim.drain.is_ordered:
        resume(state, step, victim, "the model it was to make room for is not wanted any more")
        step.decide("resume", victim.id, victim.life.reason)
    elif victim.state is WorkerState.READY:
        keep_loaded(state, step, victim)


def _place(state: SchedulerState, step: Step, model: ModelState, round_: _Round) -> None:
    demand = _demand(state, model)
    snapshot = _snapshot(state, round_, model.id)
    answer = plan(demand, snapshot)
    if isinstance(answer, Refuse):
        answer = _reconsider(state, step, demand, snapshot, answer)
    if model.partner is not None:
        answer = partners.patience(state, model.partner, answer)
    only_restore = model.restore and model.asked_at is None and state.queue.count(model.id) == 0
    if only_restore and not isinstance(answer, Admit):
        _postpone(state, step, model, answer)
        return
    _note(step, model, answer)
    match answer:
        case Admit(devices, need_mib, reason):
            _start(state, step, model, devices, need_mib, reason)
            block = EvictionBlock.STARTING if model.partner is None else EvictionBlock.PINNED
            round_.loaded[model.holder] = (_promise(model, devices, need_mib, block),)
            if model.partner is None:
                round_.loading.update(dict.fromkeys(devices, model.id))
        case Evict():
            _evict(state, step, model, round_, answer)
        case Wait(devices, need_mib, waits_for):
            model.claims = waits_for
            if devices:
                round_.coming.append(_promise(model, devices, need_mib))
            for victim in waits_for:
                round_.leaving[victim] = None
                _claim(state, step, model, state.models[victim])
        case Refuse(reason, outage, fits_nowhere):
            model.life.reason = reason
            code = outage or RejectCode.INSUFFICIENT_MEMORY
            message = f"{ASKED} can't be loaded: {reason}"
            lasts = fits_nowhere or outage is not None
            reject_all(state, step, model, code, message, retry_after_s=None if lasts else REFUSED_RETRY_S)
            state.update_wanted(model)


def _postpone(state: SchedulerState, step: Step, model: ModelState, answer: Plan) -> None:
    """Nothing goes, and nothing is drained, for a model that nobody asks for."""
    waits_for = answer.waits_for if isinstance(answer, Wait) else ()
    in_use = any(state.models[victim].state in SERVES for victim in waits_for)
    comes_back = isinstance(answer, Refuse) and answer.outage is not None
    if in_use or not (isinstance(answer, Wait) or comes_back):
        model.wish = None
        step.decide("leave", model.id, f"not loaded unasked: {answer.reason}")
    state.update_wanted(model)


def _reconsider(
    state: SchedulerState, step: Step, demand: LoadDemand, snapshot: Snapshot, answer: Refuse
) -> Refuse | Wait:
    """Where only memory used by other programs is in the way: wait until running loads and stops show in the readings."""
    held = dict.fromkeys(state.ledger.device_ids(), 0)
    for resident in snapshot.residents:
        for device in resident.devices:
            held[device] = held.get(device, 0) + resident.held_on(device)
    by_leases = tuple(replace(view, free_mib=view.usable_mib - held[view.id]) for view in snapshot.devices)
    if isinstance(plan(demand, replace(snapshot, devices=by_leases)), Refuse):
        return answer
    for option in demand.options:
        for device in option.devices:
            model_id = state.ledger.in_motion(device, step.now)
            if model_id is not None:
                reason = f"{answer.reason}; waiting to see what {model_id} takes or gives back"
                return Wait((), option.need_mib, (), reason)
    return answer


def _evict(state: SchedulerState, step: Step, model: ModelState, round_: _Round, answer: Evict) -> None:
    model.claims = answer.victims
    round_.coming.append(_promise(model, answer.devices, answer.need_mib))
    for victim_id in answer.victims:
        victim = state.models[victim_id]
        victim.claimed_by = model.id
        round_.leaving[victim_id] = None
        stop_now(state, step, victim, StopCause.ROOM, f"evicted for {model.id}")
        step.decide("evicted", victim_id, f"made room for {model.id}: {answer.reason}")


def _claim(state: SchedulerState, step: Step, waiter: ModelState, victim: ModelState) -> None:
    """An idle victim goes, a busy one will drain, unless it keeps its place for now. The first claim counts."""
    if victim.claimed_by is not None:
        return
    claim_at = state.admission.may_claim_at(waiter, victim)
    if step.now < claim_at:
        state.wake(claim_at, waiter.id)
        return
    victim.claimed_by = waiter.id
    if victim.state is WorkerState.READY and not victim.in_flight:
        stop_now(state, step, victim, StopCause.ROOM, f"evicted for {waiter.id}")
        step.decide("evicted", victim.id, f"makes room for {waiter.id}")


def _start(state: SchedulerState, step: Step, model: ModelState, devices: Devices, need_mib: int, reason: str) -> None:
    advance(model, Trigger.START, step.now, reason, devices=devices)
    if not model.spec.remote:
        state.ledger.begin(model.holder, devices, need_mib, is_partner=model.partner is not None)
    state.update_wanted(model)
    if model.partner is not None:
        partners.grant(state, step, model)
    else:
        step.emit(StartWorker(model.id, model.generation, devices, need_mib))


def _note(step: Step, model: ModelState, answer: Plan) -> None:
    """Record a plan once, however often it is made again with only its numbers changed."""
    kind = type(answer).__name__.lower()
    others = answer.victims if isinstance(answer, Evict) else answer.waits_for if isinstance(answer, Wait) else ()
    gist = f"{kind} {' '.join(others)}"
    if gist != model.last_plan or isinstance(answer, Admit):
        model.last_plan = gist
        step.decide(kind, model.id, answer.reason)


def _promise(
    model: ModelState, devices: Devices, need_mib: int, block: EvictionBlock = EvictionBlock.RESERVED
) -> Resident:
    held_mib = (need_mib,) * len(devices)
    return Resident(model.id, model.spec.type, model.spec.priority, devices, held_mib, block)


def _demand(state: SchedulerState, model: ModelState) -> LoadDemand:
    spec = model.spec
    options = (
        Option(tuple(device.id for device in device_set), model.lease_mib(device_set))
        for device_set in device_sets(spec, state.ledger.devices())
    )
    return LoadDemand(model.id, spec.type, spec.priority, tuple(options))


def _begin(state: SchedulerState, step: Step) -> _Round:
    loaded: dict[Holder, tuple[Resident, ...]] = {}
    loading: dict[DeviceId, ModelId] = {}
    for lease in state.ledger.leases():
        holder = lease.holder
        if holder not in loaded:
            loaded[holder] = _residents(state, step, state.models[holder[0]], state.ledger.leases_of(holder))
        if lease.phase is Phase.STARTING:
            loading[lease.device] = holder[0]
    return _Round(loaded, loading)


def _snapshot(state: SchedulerState, round_: _Round, asker: ModelId) -> Snapshot:
    residents = list(round_.coming)
    surplus = dict.fromkeys(state.ledger.device_ids(), 0)  # by device: being freed, less what is promised of it
    leaving: list[tuple[Resident, DeviceId]] = []
    for promised in round_.coming:
        for device in promised.devices:
            surplus[device] -= promised.held_on(device)
    for resident in chain.from_iterable(round_.loaded.values()):
        if resident.model in round_.leaving:
            for device in resident.devices:
                surplus[device] = surplus.get(device, 0) + resident.held_on(device)
                leaving.append((resident, device))
        else:
            residents.append(resident)
    views = tuple(_view(state, device, mib, round_.loading.get(device), asker) for device, mib in surplus.items())
    for resident, device in leaving:  # what they return beyond what is promised is on its way to anybody
        if (mib := min(resident.held_on(device), surplus[device])) > 0:
            surplus[device] -= mib
            residents.append(replace(resident, block=EvictionBlock.STOPPING, devices=(device,), held_mib=(mib,)))
    return Snapshot(views, tuple(residents), state.admission)


def _view(
    state: SchedulerState, device: DeviceId, surplus_mib: int, loading: ModelId | None, asker: ModelId
) -> DeviceView:
    view = state.ledger.view(device)
    blocked = view.blocked if view.outage is None else state.ledger.blocked(device, asker)
    if blocked is None and loading is not None and not state.admission.may_load(state.ledger.starting(device)):
        blocked = f"{loading} is loading"
    # Below zero, earlier waiters were promised more than is being freed for them: that much is not free for this one.
    free = view.free_mib + min(0, surplus_mib)
    return replace(view, free_mib=free, blocked=blocked)


def _residents(state: SchedulerState, step: Step, model: ModelState, leases: tuple[Lease, ...]) -> tuple[Resident, ...]:
    """The worker of these leases: as one, or device by device where each returns its memory at its own time."""
    returning = [lease for lease in leases if lease.phase is Phase.RETURNING or lease.holder != model.holder]
    parts = [(lease,) for lease in returning] if returning else [leases]
    return tuple(_resident(state, step, model, part, is_gone=bool(returning)) for part in parts)


def _resident(
    state: SchedulerState, step: Step, model: ModelState, leases: tuple[Lease, ...], *, is_gone: bool
) -> Resident:
    spec = model.spec
    block = EvictionBlock.STOPPING if is_gone else _block(state, step, model)
    held_mib = tuple(lease.held_mib for lease in leases)
    idle_s = max(0.0, step.now - model.last_used)
    reload_s = model.load_s if model.load_s is not None else max(1.0, sum(held_mib) / RELOAD_MIB_PER_S)
    devices = tuple(lease.device for lease in leases)
    return Resident(
        model.id, spec.type, spec.priority, devices, held_mib, block, idle_s, reload_s, len(model.in_flight)
    )


def _block(state: SchedulerState, step: Step, model: ModelState) -> EvictionBlock:
    """Why the worker can't be evicted now."""
    match model.state:
        case WorkerState.STARTING:
            return EvictionBlock.STARTING
        case WorkerState.STOPPING:
            return EvictionBlock.STOPPING
        case _ if model.pinned and not model.removed:
            return EvictionBlock.PINNED
        case _ if model.in_flight or model.drain is not None:
            return EvictionBlock.BUSY
    until = state.admission.keeps_place_until(model, state.queue.count(model.id), step.now)
    if step.now >= until:
        return EvictionBlock.NONE
    state.wake(until, model.id)
    return EvictionBlock.MIN_RESIDENCY
