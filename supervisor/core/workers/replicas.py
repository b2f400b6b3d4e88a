"""Replicas: several workers of one model, which share its queue.

The configured model is the first replica; `name#2`, `name#3` … are separate models in the scheduler, with their own leases,
crashes and evictions. All requests wait in the first one's queue, and any replica with a free place takes the next request.

A request that needn't wait goes to the replica that last answered the same conversation, if that replica has a free place:
its cache already contains the prompt. Else the request goes to the replica with the fewest requests.

While no replica is loaded, the first is loaded like any model; if that has failed, the next. Loads of other replicas never
evict: `replicas` of them are loaded when memory is free, and further ones, up to `replica_max`, while the queue would fill
one more. These are unloaded after `replica_idle_s` without requests; the first `replicas` are unloaded together, when the last
keep-alive among them ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from supervisor.core.admission.dispatch import reject_all
from supervisor.core.demand import Demand
from supervisor.core.effects import Effect, Reject
from supervisor.core.events import Event, RequestArrived, RequestFinished, WorkerAdopted
from supervisor.core.model_state import ModelState
from supervisor.core.planning.plans import LoadDemand
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import MODEL_PLACEHOLDER, Limits, ModelId, ModelSpec, WorkerState, base_of
from supervisor.core.workers.termination import refusal

RETRY_S = 30.0
"""Seconds until the next try to load a further replica that found no place."""


def expanded(specs: tuple[ModelSpec, ...], limits: Limits) -> Iterator[ModelSpec]:
    """The specifications of these models, each followed by those of its further replicas."""
    for spec in specs:
        yield spec
        yield from further_replicas(spec, limits)


def further_replicas(spec: ModelSpec, limits: Limits) -> Iterator[ModelSpec]:
    """The specifications of all replicas of the model but the first."""
    for number in range(2, spec.replica_max + 1):
        is_lasting = number <= spec.replicas
        keep_alive_s = spec.keep_alive_s
        if not is_lasting:
            keep_alive_s = min(limits.replica_idle_s, math.inf if keep_alive_s is None else keep_alive_s)
        yield replace(
            spec,
            id=ModelId(f"{spec.id}#{number}"),
            replica_of=spec.id,
            pin=spec.pin and is_lasting,
            preload=spec.preload and is_lasting,
            keep_alive_s=keep_alive_s,
            own_keep_alive_s=spec.own_keep_alive_s if is_lasting else 0.0,
            extra=not is_lasting,
            replica_max=1,
        )


def groups(specs: tuple[ModelSpec, ...]) -> dict[ModelId, tuple[ModelId, ...]]:
    """Models with several replicas → all their replicas, the first one first. `specs`: see `expanded`."""
    found: dict[ModelId, tuple[ModelId, ...]] = {}
    for spec in specs:
        if spec.replica_of is not None:
            found[spec.replica_of] = (*found.get(spec.replica_of, (spec.replica_of,)), spec.id)
    return found


def chosen_replica(state: SchedulerState, model: ModelState, demand: Demand) -> ModelState | None:
    """The replica that takes this request now; None: no replica has a free place."""
    open_ = [
        each
        for each in state.replicas(model)
        if each.state is WorkerState.READY and each.answering and not state.admission.is_full(each, demand)
    ]
    if demand.prefix is not None and (known := model.prefixes.get(demand.prefix)) is not None:
        for each in open_:
            if each.id == known:
                return each
    # Among equals prefer lasting replicas, so that extra ones become idle.
    return min(open_, key=lambda each: (len(each.in_flight), each.spec.extra, each.last_used), default=None)


def demands_to_plan_first(state: SchedulerState, model: ModelState, demand: LoadDemand) -> Iterator[LoadDemand]:
    """The demands to plan before `demand`, each to be accepted only where the load can start at once.

    First without the devices that other replicas of the model use. A further replica never evicts and uses only free memory:
    so it may be split over several devices even if a single device might have room later.
    """
    if model.queue_key not in state.groups:
        return
    taken = {device for each in state.replicas(model) if each is not model for device in each.devices}
    spread = demand.spread
    if taken:
        options = tuple(option for option in demand.options if taken.isdisjoint(option.devices))
        left = () if spread is None else tuple(device for device in spread.devices if device not in taken)
        if options:
            yield replace(demand, options=options, spread=None)
        if spread is not None and len(left) > 1:
            yield replace(demand, options=(), spread=replace(spread, devices=left))
    if spread is not None and not state.is_requested(model):
        yield replace(demand, spread=None)
        yield replace(demand, options=())


def with_placeholder(state: SchedulerState, model: ModelState, reason: str) -> str:
    """`reason` with a placeholder for the model's id, for clients that may know the model by another name."""
    if model.queue_key not in state.groups:
        return reason
    return re.sub(rf"\b{re.escape(model.queue_key)}\b", MODEL_PLACEHOLDER, reason)


def models_to_balance(
    state: SchedulerState, event: Event, effects: list[Effect], running: ModelId | None
) -> Iterable[ModelId]:
    """The models whose replicas this event may affect: all, except for the usual events of requests.

    `running`: the worker of the request that has finished, if it had one.
    """
    if type(event) is WorkerAdopted:  # more adoptions may follow
        return ()
    if type(event) is RequestArrived:
        name = event.model
    elif type(event) is RequestFinished and running is not None:
        name = running
    else:
        return state.groups
    if any(type(effect) is Reject for effect in effects):  # rejections of other requests, after too long a wait
        return state.groups
    names = {name, *(about for effect in effects if (about := getattr(effect, "model", None)) is not None)}
    return sorted({base_of(name) for name in names} & state.groups.keys())


def balance(state: SchedulerState, step: Step, event: Event, running: ModelId | None) -> bool:
    """Request the replicas of each model to load now. Returns whether waiters must be planned. `running`: see `models_to_balance`."""
    changed = False
    for key in models_to_balance(state, event, step.effects, running):
        model = state.models.get(key)
        if model is not None and not state.shutting_down:
            step.about = key
            changed |= _balance_replicas(state, step, model)
    step.about = None
    return changed


def _balance_replicas(state: SchedulerState, step: Step, model: ModelState) -> bool:
    replicas, queued = state.replicas(model), state.queue.count(model.id)
    loaded = [each for each in replicas if each.serves]
    primary = state.primary_replica(model)
    if not loaded and queued:
        refuse_unserved(state, step, primary)
    for each in replicas:
        if (each.id in state.wanted) != state.is_wanted(each):
            state.update_wanted(each)
    if not model.removed and any(each.state is WorkerState.READY for each in loaded):
        _want_more_replicas(state, step, model, len(loaded))
    return state.wanted.has_unplanned()


def refuse_unserved(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Reject the requests for a model that can't be loaded. Until now, other replicas may have served them."""
    if state.waiting_for(model) and (refused := refusal(state, model, step.now)) is not None:
        code, message, retry_after_s = refused
        reject_all(state, step, model, code, message, retry_after_s=retry_after_s)


def _want_more_replicas(state: SchedulerState, step: Step, model: ModelState, loaded: int) -> None:
    replicas, queued = state.replicas(model), state.queue.count(model.id)
    coming = sum(each.load_intent is not None and each.state is WorkerState.STOPPED for each in replicas)
    few, why = replicas[: model.spec.replicas], f"{model.spec.replicas} are to be loaded"
    missing = len(few) - loaded - coming
    if missing <= 0 and queued >= max(1, model.spec.target_inflight) and not coming:
        is_full = all(each.state is not WorkerState.STARTING for each in replicas)
        few, why, missing = replicas, f"{queued} requests wait", int(is_full)
    for each in few:
        if missing <= 0:
            break
        is_away = each.state is WorkerState.STOPPED and each.load_intent is None and not each.unloaded_by_operator
        if is_away and step.now >= each.last_wanted_at + RETRY_S:
            each.last_wanted_at = step.now
            each.request_restore()
            state.update_wanted(each)
            step.decide(
                "replica", each.id, f"{loaded} of {model.id} {'is' if loaded == 1 else 'are'} loaded, and {why}"
            )
            missing -= 1
