"""The steps of a request in the scheduler, numbered as in `scheduler`: refused, dispatched, queued, finished.

A request with a budget is refused at once if its answer can't come in time. The expected time includes only measured values:
the rest of the model's load, the answers to earlier requests, and the request's own answer, by the 99th percentile of such
answers. Unmeasured times count as zero, so a request is refused only for a known reason, and a first request never. Loads of
other models, future requests of a higher class, and crashes are not included: a request that these delay beyond its budget
is refused at that time (`expire`).
"""

from __future__ import annotations

import math

from supervisor.core.admission.dispatch import arm_keep_alive, assign, dispatch
from supervisor.core.admission.limits import Standing
from supervisor.core.admission.waiting import wait_reason
from supervisor.core.demand import Demand, Expected
from supervisor.core.effects import Reject
from supervisor.core.events import RequestArrived, RequestFinished
from supervisor.core.messages import listed, seconds
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import MODEL_PLACEHOLDER, RejectCode, StopCause, TicketId, WorkerState
from supervisor.core.workers.replicas import chosen_replica, with_placeholder
from supervisor.core.workers.reports import REMOTE_RETRY_S
from supervisor.core.workers.termination import refusal, stop_now, stop_reason


def arrived(state: SchedulerState, step: Step, event: RequestArrived) -> None:
    """Refuse the request, dispatch it, or queue it."""
    # 1.
    model = state.models.get(event.model)
    if model is None or model.removed:
        step.emit(Reject(event.ticket, RejectCode.MODEL_NOT_FOUND, f"There is no model '{MODEL_PLACEHOLDER}'."))
        return
    if state.shutting_down:
        message = "llmux is shutting down; try again in a moment."
        step.emit(Reject(event.ticket, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0))
        return
    primary = state.primary_replica(model)
    refused = refusal(state, primary, step.now)
    if refused is not None and not state.is_served_elsewhere(primary):
        step.emit(Reject(event.ticket, *refused))
        return
    can_answer = model.state is WorkerState.READY and model.answering
    if model.spec.is_elsewhere and model.state is WorkerState.READY and not can_answer:
        message = f"{MODEL_PLACEHOLDER}: {model.life.reason}"
        step.emit(Reject(event.ticket, RejectCode.REMOTE_UNAVAILABLE, message, REMOTE_RETRY_S))
        return
    if _refused_by_budget(state, step, model, event):
        return
    accounts = event.demand.accounts
    if accounts and _refused_by_limit(state, step, event):
        return
    # 2.
    worker: ModelState | None = model
    if model.id in state.groups:
        worker = chosen_replica(state, model, event.demand)
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
        each.unloaded_by_operator = False
        if each.drain is not None and state.wanted.claimants(each.id):
            state.wanted.settle_again(each.id)
    if model.drain is not None and state.queue.count(model.id) == 1:
        step.decide("queue", model.id, f"waits for its next worker: this one {model.drain.reason}")
    if model.has_worker and state.queue.count(model.id) == 1:
        state.touch(model)
    state.update_wanted(model)


def _refused_by_limit(state: SchedulerState, step: Step, event: RequestArrived) -> bool:
    """Refuse the request if one of its accounts has reached a limit. Returns whether it was refused."""
    accounts = state.admission.accounts
    reached = accounts.reached(event.demand.accounts, step.now)
    if reached is None:
        return False
    step.emit(limit_refusal(event.ticket, reached))
    if accounts.may_log(reached.account, step.now):
        step.decide("limit", event.model, _limit_message(reached))
    return True


def limit_refusal(ticket: TicketId, reached: Standing) -> Reject:
    """The rejection of a request over this limit."""
    retry_after_s = max(1.0, math.ceil(reached.next_s))
    message = f"{_limit_message(reached)} Try again in {seconds(retry_after_s)}."
    return Reject(ticket, RejectCode.RATE_LIMIT_EXCEEDED, message, retry_after_s, reached)


def _limit_message(reached: Standing) -> str:
    return f"The limit of {reached.account} is reached: {reached.description()}."


def finished(state: SchedulerState, step: Step, event: RequestFinished) -> None:
    """4. The request has ended: its worker has a free place, or its model's queue is shorter."""
    if event.served:
        state.admission.accounts.finished(event.ticket, event.tokens, step.now)
    else:
        state.admission.accounts.refused(event.ticket, step.now)
    model_id = state.tickets.pop(event.ticket, None)
    if model_id is None:  # the request was still queued, or its worker has already ended
        waiting = state.queue.remove(event.ticket)
        if waiting is not None:
            _waiter_left(state, step, state.models[waiting.model])
        return
    model = state.models[model_id]
    state.admission.shares.ended(event.ticket, step.now)
    if state.wanted.claimants(model_id):
        state.wanted.settle_again(model_id)
    demand = model.in_flight.pop(event.ticket)
    model.last_used, model.last_priority = step.now, demand.priority
    if demand.keep_alive_s is not None:
        model.kept_until = max(model.kept_until, step.now + demand.keep_alive_s)
    if state.queue.count(model.queue_key) > 0:
        dispatch(state, step, model)
    if model.in_flight:
        return
    state.touch(model)
    arm_keep_alive(state, model, step.now)
    drain = model.drain
    if drain is not None:  # else a waiter with several victims might never find all of them idle
        stop_now(state, step, model, drain.cause, stop_reason(model, drain))
        if not drain.is_ordered:
            step.decide("evicted", model.id, f"makes room for {model.claimed_by}")


def expire(state: SchedulerState, step: Step) -> None:
    """Reject the requests that have waited too long or whose budget is over."""
    waited = state.limits.queue_wait_s
    for waiting in state.queue.expired(step.now):
        model = state.models[waiting.model]
        step.about = model.id
        if waiting.until <= step.now:
            message = f"The budget was over before {MODEL_PLACEHOLDER} could answer. To see why: llmux why {MODEL_PLACEHOLDER}"
            step.emit(Reject(waiting.ticket, RejectCode.BUDGET_EXCEEDED, message))
        else:
            last = with_placeholder(state, model, wait_reason(state, model).what)
            message = f"Waited {waited:.0f} s for {MODEL_PLACEHOLDER}, at last for {last}. To see why: llmux why {MODEL_PLACEHOLDER}"
            step.emit(Reject(waiting.ticket, RejectCode.QUEUE_TIMEOUT, message, 30.0))
        _waiter_left(state, step, model)
    step.about = None


def _waiter_left(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Update a model whose queue lost a request. Cancel an unwanted load, unless most of it is done."""
    if model.has_worker and state.queue.count(model.id) == 0:
        state.touch(model)
    state.update_wanted(model)
    is_wanted = model.load_intent is not None or state.queue.count(model.queue_key) > 0
    if model.state is not WorkerState.STARTING or is_wanted:
        return
    if model.load_s is not None and step.now - model.life.since > model.load_s / 2:
        return
    reason = "nobody waits for it any more"
    stop_now(state, step, model, StopCause.UNWANTED, reason, force=True)
    step.decide("cancel", model.id, f"load cancelled: {reason}")


# -------------------------------------------------------------------------------------------------------------- budgets


def _refused_by_budget(state: SchedulerState, step: Step, model: ModelState, event: RequestArrived) -> bool:
    """Refuse the request if its answer can't come within its budget. Returns whether it was refused."""
    budget_s = event.demand.budget_s
    if budget_s is None:
        return False
    needed = _expected_times(state, model, event.demand, step.now)
    if needed.total_s <= budget_s:
        return False
    message = (
        f"{MODEL_PLACEHOLDER} can't answer within {_duration_text(budget_s)}: about {_duration_text(needed.total_s)} are expected ({_expected_text(needed)}). "
        "Give the request more time, or ask again when the model is loaded."
    )
    step.emit(Reject(event.ticket, RejectCode.BUDGET_TOO_SMALL, message, about=needed))
    return True


def _expected_text(needed: Expected) -> str:
    """The expected time for people: "4.0 s to load and 2.5 s for the answer"."""
    parts = {"to load": needed.load_s, "in the queue": needed.queue_s, "for the answer": needed.answer_s}
    return listed([f"{_duration_text(part_s)} {what}" for what, part_s in parts.items() if part_s > 0])


def _duration_text(time_s: float) -> str:
    """A duration with the precision needed for comparisons."""
    return f"{time_s:.1f} s" if time_s >= 1 else f"{time_s:.2g} s"


def _expected_times(state: SchedulerState, model: ModelState, demand: Demand, now: float) -> Expected:
    """The expected times of a request that arrives now, by measured values."""
    answers = demand.answers
    if answers is None:
        return Expected(_load_s(state, model, now))
    ready = [each for each in state.replicas(model) if each.state is WorkerState.READY]
    places = model.spec.target_inflight * max(1, len(ready))
    ahead = state.queue.ahead(model.id, demand) + sum(len(each.in_flight) for each in ready or [model])
    queue_s = ahead // places * answers.mean_s if places > 0 else 0.0
    return Expected(_load_s(state, model, now), queue_s, answers.p99_s)


def _load_s(state: SchedulerState, model: ModelState, now: float) -> float:
    """Seconds until the model's first replica is ready, by the duration of its last load."""
    if model.queue_key in state.groups:
        coming = [each for each in state.replicas(model) if each.serves or each.state is WorkerState.DRAINING]
        return min(
            (_remaining_load_s(each, now) for each in coming),
            default=_remaining_load_s(state.primary_replica(model), now),
        )
    return _remaining_load_s(model, now)


def _remaining_load_s(model: ModelState, now: float) -> float:
    match model.state:
        case WorkerState.READY | WorkerState.DRAINING:  # a draining worker may stay after all
            return 0.0
        case WorkerState.STARTING:
            return max(0.0, (model.load_s or 0.0) - (now - model.life.since))
        case _:
            return model.load_s or 0.0
