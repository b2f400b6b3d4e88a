"""Who has to go for whom: claims become stops and drains, or end.

A *claim* is how a waiter takes hold of a victim: an idle one is stopped at once; a busy one gets no new requests and is
stopped when the running ones end, or when `draining` cuts them. A victim keeps its place for its minimum residency
first, and for its own requests of a higher class than the waiter's, as many as may overtake. When nobody claims it any more
it serves again.
"""

from __future__ import annotations

from supervisor.core.dispatch import keep_loaded, resume
from supervisor.core.draining import drain_for
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.termination import stop_now
from supervisor.core.types import ModelId, StopCause, WorkerState
from supervisor.core.waiters import Key


def settle_claims(state: SchedulerState, step: Step) -> None:
    """Carry out what has changed about who claims whom."""
    while unsettled := state.wanted.take_unsettled():
        for model_id in unsettled:
            victim = state.models.get(model_id)
            if victim is not None:
                step.about = model_id
                _settle(state, step, victim)
    step.about = None


def _settle(state: SchedulerState, step: Step, victim: ModelState) -> None:
    claimant = _claimant(state, step, victim)
    if claimant is None:
        if not state.wanted.claimants(victim.id):
            victim.overtakes = 0
        if victim.claimed_by is not None:
            victim.claimed_by = None
            _release(state, step, victim)
        return
    victim.claimed_by = claimant
    if victim.state is WorkerState.READY and not victim.in_flight:
        stop_now(state, step, victim, StopCause.ROOM, f"evicted for {claimant}")
        step.decide("evicted", victim.id, f"makes room for {claimant}")
    else:
        drain_for(state, step, victim)


def _claimant(state: SchedulerState, step: Step, victim: ModelState) -> ModelId | None:
    """The first waiter that may claim it now."""
    for key in state.wanted.claimants(victim.id):
        waiter_id = key[1]
        if waiter_id == victim.id:  # it waits for the memory of its own last worker
            continue
        if victim.state is WorkerState.STOPPING:
            return waiter_id
        if _serves_higher_first(state, victim, key):
            continue
        waiter = state.models[waiter_id]
        claim_at = state.admission.may_claim_at(waiter, state.queue, victim)
        if step.now >= claim_at:
            return waiter_id
        state.wake_by(claim_at, waiter, step.now)
    return None


def _serves_higher_first(state: SchedulerState, victim: ModelState, waiter: Key) -> bool:
    """Does a request of a higher class than the waiter's wait for the victim itself, and may it still overtake?"""
    queue = state.queue
    if not state.takes_next(victim):
        return False
    if victim.overtakes >= state.limits.overtakes:
        return False
    is_higher = queue.most_urgent(victim.line) < queue.most_urgent(state.models[waiter[1]].line)
    return is_higher and state.admission.rank_model(victim, queue) < waiter[0]


def _release(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Nobody claims it any more: it serves again, unless it has to go anyway."""
    if victim.drain is not None and not victim.drain.is_ordered:
        yields = any(_serves_higher_first(state, victim, key) for key in state.wanted.claimants(victim.id))
        gone = "the model it was to make room for is not wanted any more"
        resume(state, step, victim, "a request of a higher class waits for it" if yields else gone)
        step.decide("resume", victim.id, victim.life.reason)
    elif victim.state is WorkerState.READY:
        keep_loaded(state, step, victim)
