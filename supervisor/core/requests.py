"""A request's way through the scheduler, by the numbers of `scheduler`: refused, dispatched, queued, finished."""

from __future__ import annotations

import math

from supervisor.core.budget import exactly, expected, told
from supervisor.core.dispatch import arm_keep_alive, assign, dispatch
from supervisor.core.effects import Reject
from supervisor.core.events import RequestArrived, RequestFinished
from supervisor.core.limits import Standing
from supervisor.core.messages import seconds
from supervisor.core.model_state import ModelState
from supervisor.core.replicas import chosen, unnamed
from supervisor.core.reports import REMOTE_RETRY_S
from supervisor.core.state import SchedulerState, Step
from supervisor.core.termination import drained, refusal, stop_now
from supervisor.core.types import ASKED, RejectCode, StopCause, TicketId, WorkerState
from supervisor.core.waiting import awaited


def arrived(state: SchedulerState, step: Step, event: RequestArrived) -> None:
    """Refuse it, dispatch it, or queue it."""
    # 1.
    model = state.models.get(event.model)
    if model is None or model.removed:
        step.emit(Reject(event.ticket, RejectCode.MODEL_NOT_FOUND, f"There is no model '{ASKED}'."))
        return
    if state.shutting_down:
        message = "llmux is shutting down; try again in a moment."
        step.emit(Reject(event.ticket, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0))
        return
    leader = state.leader(model)
    refused = refusal(state, leader, step.now)
    if refused is not None and not state.is_served_elsewhere(leader):
        step.emit(Reject(event.ticket, *refused))
        return
    can_answer = model.state is WorkerState.READY and model.answering
    if model.spec.is_elsewhere and model.state is WorkerState.READY and not can_answer:
        message = f"{ASKED}: {model.life.reason}"
        step.emit(Reject(event.ticket, RejectCode.REMOTE_UNAVAILABLE, message, REMOTE_RETRY_S))
        return
    if _cannot_fit(state, step, model, event):
        return
    accounts = event.demand.accounts
    if accounts and _is_over(state, step, event):
        return
    # 2.
    worker: ModelState | None = model
    if model.id in state.groups:
        worker = chosen(state, model, event.demand)
    elif not can_answer or state.admission.is_full(model, event.demand):
        worker = None
    if worker is not None and state.queue.count(model.id) == 0:
        if accounts:
            state.admission.accounts.admit(event.ticket, accounts, step.now)
        state.admission.shares.arrived(event.demand)
        assign(state, step, worker, event.ticket, event.demand, step.now)
        return
    # 3.
    full = state.queue.push(event.ticket, event.model, event.demand, step.now, model.spec.max_queue)
    if full is not None:
        retry_after_s = min(120.0, max(1.0, model.load_s or 1.0))
        message = f"The queue is full: {full}. Try again in {retry_after_s:.0f} s."
        load = state.queue.load(model.id, step.now)
        step.emit(Reject(event.ticket, RejectCode.QUEUE_FULL, message, retry_after_s, load))
        return
    if accounts:
        state.admission.accounts.admit(event.ticket, accounts, step.now)
    for each in state.replicas(model):
        each.dismissed = False
        if each.drain is not None and state.wanted.claimants(each.id):
            state.wanted.settle_again(each.id)
    if model.drain is not None and state.queue.count(model.id) == 1:
        step.decide("queue", model.id, f"waits for its next worker: this one {model.drain.reason}")
    if model.has_worker and state.queue.count(model.id) == 1:
        state.touch(model)
    state.update_wanted(model)


def _is_over(state: SchedulerState, step: Step, event: RequestArrived) -> bool:
    """Refuse it if one of its accounts has reached a limit."""
    accounts = state.admission.accounts
    reached = accounts.reached(event.demand.accounts, step.now)
    if reached is None:
        return False
    step.emit(over(event.ticket, reached))
    if accounts.may_tell(reached.account, step.now):
        step.decide("limit", event.model, _told(reached))
    return True


def over(ticket: TicketId, reached: Standing) -> Reject:
    """What a request is refused with whose account has reached this limit."""
    retry_after_s = max(1.0, math.ceil(reached.next_s))
    message = f"{_told(reached)} Try again in {seconds(retry_after_s)}."
    return Reject(ticket, RejectCode.RATE_LIMIT_EXCEEDED, message, retry_after_s, reached)


def _told(reached: Standing) -> str:
    return f"The limit of {reached.account} is reached: {reached.told()}."


def finished(state: SchedulerState, step: Step, event: RequestFinished) -> None:
    """4. It is over: its slot is free, or nobody waits for its model any more."""
    if event.served:
        state.admission.accounts.finished(event.ticket, event.tokens, step.now)
    else:
        state.admission.accounts.refused(event.ticket, step.now)
    model_id = state.tickets.pop(event.ticket, None)
    if model_id is None:  # it was still queued, or its worker is gone already
        waiting = state.queue.remove(event.ticket)
        if waiting is not None:
            _left(state, step, state.models[waiting.model])
        return
    model = state.models[model_id]
    state.admission.shares.ended(event.ticket, step.now)
    if state.wanted.claimants(model_id):
        state.wanted.settle_again(model_id)
    demand = model.in_flight.pop(event.ticket)
    model.last_used, model.last_priority = step.now, demand.priority
    if demand.keep_alive_s is not None:
        model.kept_until = max(model.kept_until, step.now + demand.keep_alive_s)
    if state.queue.count(model.line) > 0:
        dispatch(state, step, model)
    if model.in_flight:
        return
    state.touch(model)
    arm_keep_alive(state, model, step.now)
    drain = model.drain
    if drain is not None:  # else a waiter that needs several to go might never find all of them idle
        stop_now(state, step, model, drain.cause, drained(model, drain))
        if not drain.is_ordered:
            step.decide("evicted", model.id, f"makes room for {model.claimed_by}")


def expire(state: SchedulerState, step: Step) -> None:
    """Refuse those who have waited too long."""
    waited = state.limits.queue_wait_s
    for waiting in state.queue.expired(step.now):
        model = state.models[waiting.model]
        step.about = model.id
        if waiting.until <= step.now:
            message = f"The budget was over before {ASKED} could answer. To see why: llmux why {ASKED}"
            step.emit(Reject(waiting.ticket, RejectCode.BUDGET_EXCEEDED, message))
        else:
            last = unnamed(state, model, awaited(state, model).what)
            message = f"Waited {waited:.0f} s for {ASKED}, at last for {last}. To see why: llmux why {ASKED}"
            step.emit(Reject(waiting.ticket, RejectCode.QUEUE_TIMEOUT, message, 30.0))
        _left(state, step, model)
    step.about = None


def _cannot_fit(state: SchedulerState, step: Step, model: ModelState, event: RequestArrived) -> bool:
    """Refuse it at once if its answer can't come within its budget, instead of failing late."""
    budget_s = event.demand.budget_s
    if budget_s is None:
        return False
    needed = expected(state, model, event.demand, step.now)
    if needed.total_s <= budget_s:
        return False
    message = (
        f"{ASKED} can't answer within {exactly(budget_s)}: about {exactly(needed.total_s)} are expected ({told(needed)}). "
        "Give the request more time, or ask again when the model is loaded."
    )
    step.emit(Reject(event.ticket, RejectCode.BUDGET_TOO_SMALL, message, about=needed))
    return True


def _left(state: SchedulerState, step: Step, model: ModelState) -> None:
    """One fewer waits for the model. A load that nobody wants now is cancelled, unless most of it is done."""
    if model.has_worker and state.queue.count(model.id) == 0:
        state.touch(model)
    state.update_wanted(model)
    is_wanted = model.wish is not None or state.queue.count(model.line) > 0
    if model.state is not WorkerState.STARTING or is_wanted:
        return
    if model.load_s is not None and step.now - model.life.since > model.load_s / 2:
        return
    reason = "nobody waits for it any more"
    stop_now(state, step, model, StopCause.UNWANTED, reason, force=True)
    step.decide("cancel", model.id, f"load cancelled: {reason}")
