"""Eviction: stops or drains the victims of waiters' claims, and limits how long running requests delay an eviction.

A waiter *claims* its victims. An idle victim is stopped at once. A busy victim is drained: it gets no new requests, and is
stopped when the running ones have ended. A victim first keeps its place for its minimum residency, and for as many of its
own requests of a higher class than the waiter's as may overtake. A victim without claims serves again.

A worker that drains for another model first completes its answers: an answer in progress is never cut, and the data path
ends stalled answers. There are two exceptions: a configured `drain_s`, and a worker whose clients have all stopped reading,
since these would block two models without limit.
"""

from __future__ import annotations

import math
from dataclasses import replace

from supervisor.core.admission.dispatch import keep_loaded, resume
from supervisor.core.admission.waiters import Key
from supervisor.core.effects import AskClients
from supervisor.core.events import ClientsRead
from supervisor.core.messages import requests_counted
from supervisor.core.model_state import Drain, ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import ModelId, StopCause, WorkerState
from supervisor.core.workers.lifecycle import Trigger, advance
from supervisor.core.workers.termination import cut_requests, stop_now, stop_reason


def settle_claims(state: SchedulerState, step: Step) -> None:
    """Stop, drain or release every model whose claims may have changed."""
    while unsettled := state.wanted.take_unsettled():
        for model_id in unsettled:
            victim = state.models.get(model_id)
            if victim is not None:
                step.about = model_id
                _settle_claims_on(state, step, victim)
    step.about = None


def _settle_claims_on(state: SchedulerState, step: Step, victim: ModelState) -> None:
    claimant = _first_claimant(state, step, victim)
    if claimant is None:
        if not state.wanted.claimants(victim.id):
            victim.overtakes = 0
        if victim.claimed_by is not None:
            victim.claimed_by = None
            _release_claims_on(state, step, victim)
        return
    victim.claimed_by = claimant
    if victim.state is WorkerState.READY and not victim.in_flight:
        stop_now(state, step, victim, StopCause.ROOM, f"evicted for {claimant}")
        step.decide("evicted", victim.id, f"makes room for {claimant}")
    else:
        _drain_for_claimant(state, step, victim)


def _first_claimant(state: SchedulerState, step: Step, victim: ModelState) -> ModelId | None:
    """The first waiter that may claim the victim now."""
    for key in state.wanted.claimants(victim.id):
        waiter_id = key[1]
        if waiter_id == victim.id:  # the model waits for the memory of its own last worker
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
    """Whether the victim's own queue has a request of a higher class than the waiter's that may still overtake."""
    queue = state.queue
    if not state.takes_next(victim) or victim.overtakes >= state.limits.overtakes:
        return False
    is_higher = queue.most_urgent(victim.queue_key) < queue.most_urgent(state.models[waiter[1]].queue_key)
    return is_higher and state.admission.rank_model(victim, queue) < waiter[0]


def _release_claims_on(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Let a victim without claims serve again, unless an order drains it."""
    if victim.drain is not None and not victim.drain.is_ordered:
        yields = any(_serves_higher_first(state, victim, key) for key in state.wanted.claimants(victim.id))
        reason = "the model it was to make room for is not wanted any more"
        resume(state, step, victim, "a request of a higher class waits for it" if yields else reason)
        step.decide("resume", victim.id, victim.life.reason)
    elif victim.state is WorkerState.READY:
        keep_loaded(state, step, victim)


# --------------------------------------------------------------------------------------------------------------- drains


def _drain_for_claimant(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Drain a busy victim for its claimant. A drain in progress gets the currently configured time."""
    before = victim.drain
    if victim.state is not WorkerState.READY and (before is None or before.is_ordered):
        return
    since = step.now if before is None else before.since
    until = state.admission.drains_until(victim, since)
    if before is not None and before.until == until:
        return
    look_at = state.admission.looks_again_at(victim, step.now)
    drain = Drain(StopCause.ROOM, f"drains for {victim.claimed_by}", since, until, look_at)
    if before is None:
        advance(victim, Trigger.DRAIN, step.now, drain.reason, drain=drain)
    else:
        victim.drain = drain
    _record_drain(state, step, victim, drain)
    if look_at is not None:
        state.wake(look_at, victim.id)
        step.emit(AskClients(victim.id, victim.generation))


def _record_drain(state: SchedulerState, step: Step, victim: ModelState, drain: Drain) -> None:
    state.wake(drain.until, victim.id)
    end = "never cut" if math.isinf(drain.until) else f"cut in {drain.until - step.now:.0f} s"
    if drain.look_at is not None:  # else the configuration sets `until`
        end += " while clients read"
    step.decide("drain", victim.id, f"{drain.reason}; {requests_counted(len(victim.in_flight))} in flight, {end}")


def end_due_drain(state: SchedulerState, step: Step, model: ModelState) -> None:
    """End the model's drain if due (an ordered one too), or ask again how far its clients have read."""
    drain = model.drain
    if drain is None:
        return
    if step.now >= drain.until:
        _cut_and_stop(state, step, model, drain, f"after {step.now - drain.since:.0f} s")
    elif drain.look_at is not None and step.now >= drain.look_at:
        look_at = state.admission.looks_again_at(model, step.now)
        model.drain = replace(drain, look_at=look_at)
        if look_at is not None:
            state.wake(look_at, model.id)
            step.emit(AskClients(model.id, model.generation))


def clients_read(state: SchedulerState, step: Step, event: ClientsRead) -> None:
    """Cut the requests of a draining worker when all of its clients have stopped reading."""
    model = state.current(event.model, event.generation)
    drain = None if model is None else model.drain
    if model is None or drain is None or drain.look_at is None:
        return
    model.drain = replace(drain, read=event.read)
    stopped = (
        ticket in drain.read
        and ticket in event.read
        and state.admission.has_stopped_reading(event.read[ticket] - drain.read[ticket])
        for ticket in model.in_flight
    )
    if all(stopped):
        _cut_and_stop(state, step, model, drain, "as the clients have stopped reading")


def _cut_and_stop(state: SchedulerState, step: Step, model: ModelState, drain: Drain, why: str) -> None:
    needed = not drain.is_ordered and model.claimed_by is not None
    cut_requests(step, model, f"its memory is needed for {model.claimed_by}" if needed else drain.reason)
    stop_now(state, step, model, drain.cause, stop_reason(model, drain))
    kind = "stop" if drain.is_ordered else "evicted"
    step.decide(kind, model.id, f"{drain.reason}; {requests_counted(len(model.in_flight))} cut {why}")
