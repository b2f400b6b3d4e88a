"""Who has to go for whom: claims become stops and drains, or end.

A *claim* is how a waiter takes hold of a victim: an idle one is stopped at once; a busy one gets no new requests and is
stopped when the running ones end, or when `draining` cuts them. A victim keeps its place for its minimum residency
first, and for its own requests of a higher class than the waiter's, as many as may overtake. When nobody claims it any more
it serves again.
"""

from __future__ import annotations

from collections.abc import Iterator

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
                _settle(state, step, victim)


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
        drain_for(state, step, victim, urgent=_is_urgent(state, victim))
    if (own := state.wanted.key(victim.id)) is not None:
        for model_id in state.claims(victim.id):  # who waits for a waiter, waits for these, too
            other = state.wanted.key(model_id)
            if other is None or other < own:
                state.wanted.settle_again(model_id)


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
        claim_at = state.admission.may_claim_at(waiter, state.queue.most_urgent(waiter.line), victim)
        if step.now >= claim_at:
            return waiter_id
        state.wake(claim_at, waiter_id)
    return None


def _serves_higher_first(state: SchedulerState, victim: ModelState, waiter: Key) -> bool:
    """Does a request of a higher class than the waiter's wait for the victim itself, and may it still overtake?"""
    queue = state.queue
    if not queue.count(victim.line) or not victim.answering or state.admission.is_full(victim):
        return False
    if victim.overtakes >= state.limits.overtakes:
        return False
    is_higher = queue.most_urgent(victim.line) < queue.most_urgent(state.models[waiter[1]].line)
    return is_higher and state.admission.rank_model(victim, queue) < waiter[0]


def _is_urgent(state: SchedulerState, victim: ModelState) -> bool:
    """Does anybody wait for it who may ask it to end soon? Also one who waits for a waiter, or for the victim's next worker."""
    if state.queue.count(victim.line) and victim.in_flight:
        lowest = min(demand.priority for demand in victim.in_flight.values())
        if state.queue.most_urgent(victim.line) < lowest:
            return True
    waiters = _waiters(state, victim)
    return any(state.admission.is_urgent(each, state.queue.most_urgent(each.line), victim) for each in waiters)


def _waiters(state: SchedulerState, victim: ModelState) -> Iterator[ModelState]:
    own = state.wanted.key(victim.id)
    for key in state.wanted.claimants(victim.id):
        if own is None or key > own:  # who waits for a waiter comes after it
            waiter = state.models[key[1]]
            yield waiter
            yield from _waiters(state, waiter)


def _release(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Nobody claims it any more: it serves again, unless it has to go anyway."""
    if victim.drain is not None and not victim.drain.is_ordered:
        yields = any(_serves_higher_first(state, victim, key) for key in state.wanted.claimants(victim.id))
        gone = "the model it was to make room for is not wanted any more"
        resume(state, step, victim, "a request of a higher class waits for it" if yields else gone)
        step.decide("resume", victim.id, victim.life.reason)
    elif victim.state is WorkerState.READY:
        keep_loaded(state, step, victim)
