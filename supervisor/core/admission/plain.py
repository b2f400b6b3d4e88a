"""A fast path for the most frequent events: a ready worker takes or completes a request, and no request or model waits.

It has the same result as the full path in `scheduler`, whose other steps would do nothing here. A test compares both paths.
"""

from __future__ import annotations

from supervisor.core.admission.dispatch import arm_keep_alive
from supervisor.core.effects import Dispatch, Effect
from supervisor.core.events import Event, RequestArrived, RequestFinished
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState
from supervisor.core.types import WorkerState

LEAST_KEEP_ALIVE_S = 0.001
"""With a shorter keep-alive a timer may be due at once."""


def handle_if_plain(state: SchedulerState, event: Event, now: float) -> list[Effect] | None:
    """Handle the event if it is a plain case. Returns its effects; None: not plain, and nothing was changed."""
    if type(event) is RequestArrived:
        return _dispatch_if_plain(state, event, now)
    return _finish_if_plain(state, event, now) if type(event) is RequestFinished else None


def _is_at_rest(state: SchedulerState, now: float) -> bool:
    """Whether no request or model waits, and no timer is due. This is enough: e.g. a shutdown leaves no worker READY."""
    timers = state.timers
    return not ((timers and timers[0][0] <= now) or state.wanted or state.queue or not state.ledger.is_at_rest())


def _is_alone(state: SchedulerState, model: ModelState) -> bool:
    """Whether the model is ready and has no replicas."""
    return model.life.state is WorkerState.READY and model.spec.replica_of is None and model.id not in state.groups


def _dispatch_if_plain(state: SchedulerState, event: RequestArrived, now: float) -> list[Effect] | None:
    model, demand = state.models.get(event.model), event.demand
    if model is None or demand.accounts or demand.budget_s is not None:
        return None
    worker = model.worker
    if (
        worker is None
        or not worker.answering
        or worker.stuck
        or not _is_alone(state, model)
        or not _is_at_rest(state, now)
    ):
        return None
    admission = state.admission
    if admission.is_full(model, demand):
        return None
    if not model.in_flight:
        state.ledger.forget_summaries(worker.devices)
    model.in_flight[event.ticket] = demand
    state.queue.recent.note(event.model, 0.0, now)
    admission.shares.arrived(demand)
    admission.shares.began(event.ticket, event.model, demand, now)
    model.last_used, model.last_priority = now, demand.priority
    state.tickets[event.ticket] = event.model
    return [Dispatch(event.ticket, event.model, model.generation)]


def _finish_if_plain(state: SchedulerState, event: RequestFinished, now: float) -> list[Effect] | None:
    name = state.tickets.get(event.ticket)
    model = None if name is None else state.models[name]
    if model is None or not _is_alone(state, model) or not _is_at_rest(state, now):
        return None
    demand, keep_alive_s = model.in_flight[event.ticket], model.spec.keep_alive_s
    if demand.accounts or (keep_alive_s is not None and keep_alive_s < LEAST_KEEP_ALIVE_S):
        return None
    del state.tickets[event.ticket], model.in_flight[event.ticket]
    state.admission.shares.ended(event.ticket, now)
    model.last_used, model.last_priority = now, demand.priority
    if demand.keep_alive_s is not None:
        model.kept_until = max(model.kept_until, now + demand.keep_alive_s)
    if not model.in_flight:
        state.ledger.forget_summaries(model.devices)
        arm_keep_alive(state, model, now)
    return []
