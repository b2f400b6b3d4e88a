"""Default models are loaded again when no other model is requested.

Each has one timer. When the timer fires, and no other model was requested for `default_after_s`, an unloaded default model
gets a load intent. Idle models are evicted for it, as for a request. But no model is drained or waited for, and no other
default model is evicted: two that don't fit together would replace each other for ever. An intent without a place is dropped,
and renewed after another `default_after_s`. A model that an operator unloaded isn't loaded until somebody requests it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from supervisor.core.model_state import LoadIntent, ModelState
from supervisor.core.planning.plans import Evict, EvictionBlock, Plan, Snapshot
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import WorkerState, base_of


def arm(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Set or drop the model's timer, since the configuration may have changed."""
    if model.id not in state.admission.policy.default_models:
        model.returns_at = None
        return
    at = step.now + state.limits.default_after_s
    if model.returns_at is None or at < model.returns_at:
        _set_timer(state, model, at)


def return_if_due(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Set a default model's load intent if it should return now. Its timer is set again in any case."""
    if model.returns_at is None or step.now < model.returns_at:
        return
    at = step.now + state.limits.default_after_s
    if model.state is WorkerState.STOPPED and not (model.unloaded_by_operator or model.removed or state.shutting_down):
        quiet_at = _quiet_at(state, step)
        if quiet_at > step.now:
            at = min(at, quiet_at)
        elif model.load_intent is None:
            model.load_intent = LoadIntent(default=True)
            step.decide("return", model.id, f"nothing else was asked for within {state.limits.default_after_s:.0f} s")
    _set_timer(state, model, at)


def may_evict(state: SchedulerState, step: Step, model: ModelState, answer: Plan) -> bool:
    """Whether this plan may evict for a model without requests: only for a default model, while no other model is used."""
    intent = model.load_intent
    return intent is not None and intent.default and isinstance(answer, Evict) and _quiet_at(state, step) <= step.now


def pin_other_defaults(state: SchedulerState, model: ModelState, snapshot: Snapshot) -> Snapshot:
    """`snapshot` for planning `model`: if it only returns as a default model, the other default models are pinned."""
    if model.load_intent != LoadIntent(default=True) or state.waiting_for(model):
        return snapshot
    names = state.admission.policy.default_models
    residents = (
        replace(each, block=EvictionBlock.PINNED)
        if base_of(each.model) in names and each.block is not EvictionBlock.STOPPING
        else each
        for each in snapshot.residents
    )
    return replace(snapshot, residents=tuple(residents))


def _quiet_at(state: SchedulerState, step: Step) -> float:
    """When default models may return if no other model is used until then."""
    if len(state.queue):
        return step.now + state.limits.default_after_s
    names = state.admission.policy.default_models
    others = (model for model in state.models.values() if model.queue_key not in names and not model.spec.remote)
    return max((state.admission.quiet_at(other, step.now) for other in others), default=-math.inf)


def _set_timer(state: SchedulerState, model: ModelState, at: float) -> None:
    model.returns_at = at
    state.wake(at, model.id)
