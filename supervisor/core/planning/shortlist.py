"""The shortlist: the device sets that the planner should evaluate for a waiter, by a rough estimate from device summaries.

A plan for a device set costs a tenth of a millisecond, and there may be hundreds. An estimate costs a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from supervisor.core.admission.waiters import Key, Place
from supervisor.core.model_state import ModelState
from supervisor.core.planning.plans import DeviceSummary, EvictionRank, Option, Room
from supervisor.core.planning.snapshots import device_summary
from supervisor.core.state import SchedulerState
from supervisor.core.types import DeviceId, Devices, ModelId, WorkerState

Cost = tuple[int, EvictionRank, int, float]
"""Less is better: severity of the obstacle; then, of the models to evict: highest standing, number, total value."""

_NO_STANDING: EvictionRank = (-math.inf, 0)
_WORST_COST: Cost = (5, _NO_STANDING, 0, 0.0)
_NO_MODELS: AbstractSet[ModelId] = frozenset()


def shortlisted(
    state: SchedulerState,
    now: float,
    model: ModelState,
    key: Key,
    options: dict[Devices, Option],
    before: Place | None,
    offered: set[DeviceId],
) -> list[Option]:
    """The device sets to plan for: the waiter's own place, and the best one by estimate with an `offered` device."""
    own = [options[before.devices]] if before is not None and before.devices in options else []
    if own and offered == {*own[0].devices} and len(offered) == 1:
        return own
    others: Iterable[Option] = options.values()
    if "" not in offered:
        others = [option for option in others if not offered.isdisjoint(option.devices)]
    best, best_cost = own, _WORST_COST
    for option in others:
        if option not in own and (cost := _estimate_cost(state, now, model, key, option, best_cost)) < best_cost:
            best, best_cost = [*own, option], cost
            if cost[0] == 0:  # the model fits there, and earlier options are preferred
                break
    return best


def _estimate_cost(
    state: SchedulerState, now: float, model: ModelState, key: Key, option: Option, best_cost: Cost
) -> Cost:
    """The estimated cost of a device set. The calculation stops as soon as the cost is known to exceed `best_cost`."""
    admission, own = state.admission, model.spec.priority
    best_known = best_obstacle, best_highest, best_count = best_cost[:3]
    obstacle, highest, count, value = 0, _NO_STANDING, 0, 0.0
    for device, need_mib in zip(option.devices, option.need_mib, strict=True):
        there = state.ledger.summary(device) or device_summary(state, now, device)
        if there.outage is not None:
            return (4, _NO_STANDING, 0, 0.0)
        now_mib, later_mib, claimed = there.free_mib, there.free_mib + there.coming_mib, _NO_MODELS
        if there.across or state.wanted.placed_on(device):
            now_mib, later_mib, claimed = room_for_waiter(state, key, device, there)
        if need_mib <= now_mib and there.is_open:
            continue
        short_mib = need_mib - max(now_mib, later_mib)
        obstacle = max(obstacle, 3 if short_mib > there.evictable_mib[-1] else 1 if there.is_open else 2)
        if obstacle > best_obstacle:
            return (obstacle, _NO_STANDING, 0, 0.0)
        if obstacle == 3:
            continue
        idle, enough = there.idle, best_count - count
        if obstacle == best_obstacle and 0 <= enough < len(idle) and there.evictable_mib[enough] < short_mib:
            highest = max(
                highest, idle[enough].standing
            )  # evicted too: as many models as in the best option don't suffice
            if highest >= best_highest:
                return (obstacle, highest, best_count + 1, 0.0)
        for standing, _, model_id, reserved_mib, reload_s, last_used, until, kept_until, used_by in idle:
            if short_mib <= 0:
                break
            priority = standing[0]
            may_go = now >= kept_until or admission.may_overtake(own, priority)
            if not may_go and now >= until:
                as_urgent_at = admission.as_urgent_at(model, state.queue, used_by)
                may_go = as_urgent_at is None or now >= as_urgent_at
            if may_go and model_id not in claimed and (priority <= own or admission.may_evict_higher()):
                short_mib -= reserved_mib
                count += 1
                if (obstacle, standing, count) > best_known:
                    return (obstacle, standing, count, value)
                highest = max(highest, standing)
                value += admission.value(reload_s, now - last_used)
        if short_mib > 0:
            obstacle = 3
    return obstacle, highest, count, value


def room_for_waiter(state: SchedulerState, key: Key, device: DeviceId, there: DeviceSummary) -> Room:
    """The device's room after the waiters before `key`: MiB free now, MiB after all returns, and the models that they claim."""
    placed = state.wanted.placed_on(device)
    claimed = {  # also by waiters for other devices
        model_id for model_id in there.across if (keys := state.wanted.claimants(model_id)) and keys[0] < key
    }
    if not claimed and (not placed or placed[0] >= key):
        return there.free_mib, there.free_mib + there.coming_mib, _NO_MODELS
    places = [state.wanted.place(other[1]) for other in placed if other < key]
    before = places, frozenset(claimed)
    if there.promised_before and there.promised_before[0][0] == before:  # the usual case: nothing has changed since
        return there.promised_before[0][1]
    promised = evicted_mib = stopping = 0
    for place in places:
        assert place is not None
        promised += place.promised_on(device)
        claimed.update(place.claims)
    for model_id in claimed:
        model = state.models.get(model_id)
        reserved_mib = 0 if model is None else state.ledger.reserved_mib(model_id, device)
        evicted_mib += reserved_mib
        if model is None or not model.has_worker or model.state is WorkerState.STOPPING:
            stopping += reserved_mib
    now_mib = there.free_mib + min(0, evicted_mib - promised)
    later_mib = there.free_mib + there.coming_mib + evicted_mib - stopping - promised
    there.promised_before[:] = [(before, (now_mib, later_mib, claimed))]
    return now_mib, later_mib, claimed
