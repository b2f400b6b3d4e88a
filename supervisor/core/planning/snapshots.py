"""Snapshots for the planner: the devices where a model may go, the models that hold memory there, and the promised memory.

A waiter's snapshot treats earlier plans as executed: their victims have ended, and their models are loaded. So the waiter can
use the remaining memory, but never takes memory that is being freed for an earlier waiter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from supervisor.core.admission.waiters import Key
from supervisor.core.memory.device_ledger import Lease, Phase
from supervisor.core.memory.device_sets import MOST_PARTS, Spread
from supervisor.core.model_state import ModelState
from supervisor.core.planning.plans import DeviceSummary, DeviceView, EvictionBlock, Idle, Resident, Snapshot
from supervisor.core.state import SchedulerState
from supervisor.core.types import DeviceId, Devices, ModelId, Parts, WorkerState


def snapshot(state: SchedulerState, now: float, devices: Devices, asker: Key) -> Snapshot:
    """The devices for planning `asker`: with the promises to the waiters before it."""
    earlier: dict[ModelId, None] = {}
    for device in devices:
        for key in state.wanted.placed_on(device):
            if key >= asker:
                break
            earlier[key[1]] = None
    promises: list[Resident] = []
    evicted: set[ModelId] = set()
    for model_id in earlier:
        place = state.wanted.place(model_id)
        assert place is not None
        evicted.update(place.claims)
        if place.need_mib:
            promises.append(_promised_resident(state.models[model_id], place.devices, place.need_mib))
    return _build_snapshot(state, now, devices, asker[1], promises, evicted)


def _build_snapshot(
    state: SchedulerState, now: float, devices: Devices, asker: ModelId, promises: list[Resident], evicted: set[ModelId]
) -> Snapshot:
    residents = list(promises)
    surplus = dict.fromkeys(devices, 0)  # by device: MiB being freed, less promised MiB
    going: list[tuple[Resident, DeviceId]] = []
    for promised in promises:
        for device in promised.devices:
            if device in surplus:
                surplus[device] -= promised.reserved_on(device)
    for resident in _residents_on(state, now, devices, state.models[asker]):
        if resident.model in evicted:
            for device in resident.devices:
                if device in surplus:
                    surplus[device] += resident.reserved_on(device)
                    going.append((resident, device))
        else:
            residents.append(resident)
    views = tuple(_view_for(state, device, mib, asker) for device, mib in surplus.items())
    for resident, device in going:  # memory returned beyond the promises is available to anybody
        if (mib := min(resident.reserved_on(device), surplus[device])) > 0:
            surplus[device] -= mib
            residents.append(replace(resident, block=EvictionBlock.STOPPING, devices=(device,), reserved_mib=(mib,)))
    return Snapshot(views, tuple(residents), state.admission)


def by_leases(seen: Snapshot) -> Snapshot:
    """The snapshot as if only the leases counted, and no measurement."""
    reserved_mib = {view.id: 0 for view in seen.devices}
    for resident in seen.residents:
        for device in resident.devices:
            if device in reserved_mib:
                reserved_mib[device] += resident.reserved_on(device)
    views = tuple(replace(view, free_mib=view.usable_mib - reserved_mib[view.id]) for view in seen.devices)
    return replace(seen, devices=views)


def device_summary(state: SchedulerState, now: float, device: DeviceId) -> DeviceSummary:
    """The device's summary: how much memory it could provide. It is cached until something changes on the device."""
    ledger = state.ledger
    known = ledger.summary(device)
    if known is None:
        view = ledger.view(device)
        coming = 0
        idle: list[Idle] = []
        admission, queue = state.admission, state.queue
        keeps_place_until, value = admission.keeps_place_until, admission.value
        for lease in ledger.leases_on(device):
            name, generation = lease.holder
            model = state.models[name]
            at = model.life.state
            if lease.phase is Phase.RETURNING or generation != model.generation or at is WorkerState.STOPPING:
                coming += lease.reserved_mib
            elif at is WorkerState.READY and not model.in_flight and not (model.pinned and not model.removed):
                until = max(keeps_place_until(model, queue, now), admission.protected_until(model))
                kept_until = max(until, admission.kept_for_user_until(model))
                if kept_until > now:
                    state.wake_by(until if until > now else kept_until, model, now)
                reload_s, last_used, used_by = model.reload_s, model.last_used, model.last_priority
                worth = value(reload_s, now - last_used)
                standing = (model.spec.priority, 0)
                idle.append(
                    Idle(standing, worth, name, lease.reserved_mib, reload_s, last_used, until, kept_until, used_by)
                )
        users = admission.users({each.model: (each.used_by, now - each.last_used) for each in idle})
        idle = sorted(each._replace(standing=(each.standing[0], -users[each.model])) for each in idle)
        usable = view.blocked is None and not _is_loading(state, device)
        evictable = tuple(accumulate([each.reserved_mib for each in idle], initial=0))
        across = tuple(
            lease.holder[0] for lease in ledger.leases_on(device) if len(state.models[lease.holder[0]].devices) > 1
        )
        known = DeviceSummary(view.free_mib, coming, tuple(idle), evictable, usable, view.outage, across)
        ledger.keep_summary(device, known)
    return known


def usable_spread(state: SchedulerState, now: float, model: ModelState) -> Spread | None:
    """How the model may be split over several devices: of more devices than a program can use, those with most room."""
    spread = model.spread(state.ledger.devices())
    if spread is None or len(spread.devices) <= MOST_PARTS:
        return spread
    known = {device: device_summary(state, now, device) for device in spread.devices}
    most = {
        at: each.free_mib + each.coming_mib + each.evictable_mib[-1]
        for at, each in known.items()
        if each.outage is None
    }
    devices = sorted(most, key=lambda device: (-most[device], device))[:MOST_PARTS]
    return replace(spread, devices=tuple(sorted(devices)))


def _promised_resident(model: ModelState, devices: Devices, need_mib: Parts) -> Resident:
    return Resident(model.id, model.spec.type, model.spec.priority, devices, need_mib, EvictionBlock.RESERVED)


def _view_for(state: SchedulerState, device: DeviceId, surplus_mib: int, asker: ModelId) -> DeviceView:
    view = state.ledger.view(device)
    blocked = view.blocked if view.outage is None else state.ledger.blocked(device, asker)
    if blocked is None and (loading := _is_loading(state, device)) is not None:
        blocked = f"{loading} is loading"
    if blocked == view.blocked and surplus_mib >= 0:
        return view
    # Below zero, earlier waiters have promises beyond the memory being freed: that much isn't free for this waiter.
    return replace(view, free_mib=view.free_mib + min(0, surplus_mib), blocked=blocked)


def _is_loading(state: SchedulerState, device: DeviceId) -> ModelId | None:
    """The model whose load prevents another start on the device; None: another load may start."""
    starting = [lease.holder[0] for lease in state.ledger.leases_on(device) if lease.phase is Phase.STARTING]
    return None if not starting or state.admission.may_load(len(starting)) else starting[-1]


def _residents_on(state: SchedulerState, now: float, devices: Devices, asker: ModelState) -> Iterable[Resident]:
    """The residents of these devices: on each the oldest lease first, and each holder once."""
    seen = set()
    for device in devices:
        for lease in state.ledger.leases_on(device):
            if lease.holder not in seen:
                seen.add(lease.holder)
                model = state.models[lease.holder[0]]
                yield from _residents_of_worker(state, now, model, state.ledger.leases_of(lease.holder), asker)


def _residents_of_worker(
    state: SchedulerState, now: float, model: ModelState, leases: tuple[Lease, ...], asker: ModelState
) -> Iterable[Resident]:
    """The residents of one worker's leases: one for all, or one for each device that returns its memory at its own time."""
    returning = [lease for lease in leases if lease.phase is Phase.RETURNING or lease.holder != model.holder]
    if not returning:
        yield resident(now, model, leases, _eviction_block(state, now, model, asker))
    for lease in returning:
        yield resident(now, model, (lease,), EvictionBlock.STOPPING)


def resident(now: float, model: ModelState, leases: tuple[Lease, ...], block: EvictionBlock) -> Resident:
    """The model with these leases, in the planner's view."""
    spec = model.spec
    reserved_mib = tuple(lease.reserved_mib for lease in leases)
    return Resident(
        model.id,
        spec.type,
        spec.priority,
        tuple(lease.device for lease in leases),
        reserved_mib,
        block,
        max(0.0, now - model.last_used),
        model.reload_s,
        len(model.in_flight),
        model.used_by,
    )


def _eviction_block(state: SchedulerState, now: float, model: ModelState, asker: ModelState) -> EvictionBlock:
    """Why the worker can't be evicted for `asker` now. Sets a timer for the end of the block."""
    match model.state:
        case WorkerState.STARTING:
            return EvictionBlock.STARTING
        case WorkerState.STOPPING:
            return EvictionBlock.STOPPING
        case _ if model.pinned and not model.removed:
            return EvictionBlock.PINNED
        case WorkerState.DRAINING:
            return EvictionBlock.DRAINING
        case _ if model.in_flight:
            return EvictionBlock.BUSY
    yields_at = state.admission.yields_at(model, asker, state.queue)
    until = max(yields_at, state.admission.keeps_place_until(model, state.queue, now))
    if now >= until:
        return EvictionBlock.NONE
    state.wake_by(until, model, now)
    if now >= yields_at:
        return EvictionBlock.MIN_RESIDENCY
    return EvictionBlock.PROTECTED if now < state.admission.protected_until(model) else EvictionBlock.LAST_USED
