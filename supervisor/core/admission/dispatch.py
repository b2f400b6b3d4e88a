"""Dispatch: sends queued requests to workers, rejects them, and keeps a worker loaded for later ones."""

from __future__ import annotations

import math

from supervisor.core.demand import Demand
from supervisor.core.effects import Dispatch, Reject
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import ModelId, RejectCode, TicketId, WorkerState
from supervisor.core.workers.lifecycle import Trigger, advance

MOST_PREFIXES = 4096
"""Maximum number of remembered conversations of a model, each with its replica."""


def dispatch(state: SchedulerState, step: Step, model: ModelState) -> bool:
    """Send queued requests to the worker, as many as its state and limits allow. Returns whether any was sent."""
    served = False
    while (
        model.state is WorkerState.READY
        and state.takes_next(model)
        and (waiting := state.queue.pop(model.queue_key)) is not None
    ):
        assign(state, step, model, waiting.ticket, waiting.demand, waiting.arrived_at)
        served = True
    return served


def serve_heads(state: SchedulerState, step: Step) -> bool:
    """Dispatch to workers with a shared context: the next request may need less of it. Returns whether any was sent."""
    sharing = [key for key in state.queue.models() if state.models[key].spec.shared_context]
    workers = [worker for key in sharing for worker in state.replicas(state.models[key])]
    return any(dispatch(state, step, worker) for worker in workers)


def assign(
    state: SchedulerState, step: Step, model: ModelState, ticket: TicketId, demand: Demand, arrived_at: float
) -> None:
    """Dispatch this request to the worker."""
    state.queue.recent.note(model.queue_key, step.now - arrived_at, step.now)
    if not model.in_flight:
        state.touch(model)
    model.in_flight[ticket] = demand
    state.admission.shares.began(ticket, model.id, demand, step.now)
    if claimants := state.wanted.claimants(model.id):
        _count_overtake(state, model, claimants[0][1], arrived_at)
    if demand.prefix is not None and model.queue_key in state.groups:
        _remember_replica(state.models[model.queue_key], demand.prefix, model.id)
    model.last_used, model.last_priority = step.now, demand.priority
    state.tickets[ticket] = model.id
    step.emit(Dispatch(ticket, model.id, model.generation))


def _remember_replica(model: ModelState, prefix: int, replica: ModelId) -> None:
    """Remember the replica of the conversation with this prefix."""
    model.prefixes[prefix] = replica
    model.prefixes.move_to_end(prefix)
    if len(model.prefixes) > MOST_PREFIXES:
        model.prefixes.popitem(last=False)


def _count_overtake(state: SchedulerState, model: ModelState, waiter: ModelId, arrived_at: float) -> None:
    """Count a later request that the model got while `waiter` waits for its memory; the claim is checked again."""
    waiting_since = (state.queue.oldest(state.models[waiter].queue_key), state.models[waiter].asked_at)
    if arrived_at > min((since for since in waiting_since if since is not None), default=math.inf):
        model.overtakes += 1
    state.wanted.settle_again(model.id)


def reject_all(
    state: SchedulerState,
    step: Step,
    model: ModelState,
    code: RejectCode,
    message: str,
    *,
    retry_after_s: float | None = None,
) -> None:
    """Reject every queued request that only this model could serve, and drop the model's load intent."""
    if state.waiting_for(model):
        for waiting in state.queue.clear(model.queue_key):
            step.emit(Reject(waiting.ticket, code, message, retry_after_s))
    model.load_intent = None


def resume(state: SchedulerState, step: Step, model: ModelState, reason: str) -> None:
    """End the worker's drain: it serves again, including requests that arrived meanwhile."""
    advance(model, Trigger.RESUME, step.now, reason)
    keep_loaded(state, step, model)


def keep_loaded(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Let a ready worker whose memory is no longer claimed continue to serve."""
    model.load_intent = None
    dispatch(state, step, model)
    arm_keep_alive(state, model, step.now)


def arm_keep_alive(state: SchedulerState, model: ModelState, now: float) -> None:
    """Set the timer that stops an idle worker at the end of its keep-alive. A model has one such timer at a time."""
    if model.state is not WorkerState.READY or model.in_flight:
        return
    at = state.keep_loaded_until(model, now)
    if at < math.inf and (model.keep_alive_at is None or at < model.keep_alive_at):
        model.keep_alive_at = at
        state.wake(at, model.id)
