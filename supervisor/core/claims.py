"""Who has to go for whom: claims become stops and drains, or end.

A *claim* is how a waiter takes hold of a victim: an idle one is stopped at once; a busy one gets no new requests and is
stopped when the running ones end, or when `draining` cuts them. A victim keeps its place for its minimum residency
first. When nobody claims it any more it serves again.
"""

from __future__ import annotations

from supervisor.core.dispatch import keep_loaded, resume
from supervisor.core.draining import drain_for
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.termination import stop_now
from supervisor.core.types import ModelId, StopCause, WorkerState


def settle_claims(state: SchedulerState, step: Step) -> None:
    """Carry out what has changed about who claims whom."""
    while unsettled := state.wanted.take_unsettled():
        for model_id in unsettled:
            victim = state.models.get(model_id)
            if victim is not None:
                _settle(state, step, victim)


def _settle(state: SchedulerState, step: Step, victim: ModelState) -> None:
    claimant = _claimant(state, step, victim)
    if claimant is None:
        if victim.claimed_by is not None:
            victim.claimed_by = None
            _release(state, step, victim)
        return
    victim.claimed_by = claimant
    if victim.state is WorkerState.READY and not victim.in_flight:
        stop_now(state, step, victim, StopCause.ROOM, f"evicted for {claimant}")
        step.decide("evicted", victim.id, f"makes room for {claimant}")
    else:
        drain_for(state, step, victim, _urgency(state, victim))
    if (own := state.wanted.key(victim.id)) is not None:
        for model_id in state.claims(victim.id):  # who waits for a waiter, waits for these, too
            other = state.wanted.key(model_id)
            if other is None or other < own:
                state.wanted.settle_again(model_id)


def _claimant(state: SchedulerState, step: Step, victim: ModelState) -> ModelId | None:
    """The first waiter that may claim it now."""
    for _, waiter_id in state.wanted.claimants(victim.id):
        if waiter_id == victim.id:  # it waits for the memory of its own last worker
            continue
        if victim.state is WorkerState.STOPPING:
            return waiter_id
        claim_at = state.admission.may_claim_at(state.models[waiter_id], victim)
        if step.now >= claim_at:
            return waiter_id
        state.wake(claim_at, waiter_id)
    return None


def _urgency(state: SchedulerState, victim: ModelState) -> int:
    """The highest priority of a model that waits for it: also of those who wait for a waiter, all later than that."""
    own = state.wanted.key(victim.id)
    priorities = [victim.spec.priority] if own is not None else []
    later = [key for key in state.wanted.claimants(victim.id) if own is None or key > own]
    return max([*priorities, *(_urgency(state, state.models[model_id]) for _, model_id in later)])


def _release(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Nobody claims it any more: it serves again, unless it has to go anyway."""
    if victim.drain is not None and not victim.drain.is_ordered:
        resume(state, step, victim, "the model it was to make room for is not wanted any more")
        step.decide("resume", victim.id, victim.life.reason)
    elif victim.state is WorkerState.READY:
        keep_loaded(state, step, victim)
