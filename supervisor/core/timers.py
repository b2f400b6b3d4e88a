"""Timers: the end of a backoff, of a drain, of an idle model's keep-alive, of a request's waiting time, and the
return of a default model.

A timer only triggers a check of a model; the due action follows from the model's state, so a late or unnecessary timer
is harmless.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.admission.dispatch import arm_keep_alive
from supervisor.core.admission.requests import expire
from supervisor.core.memory import partners
from supervisor.core.model_state import ModelState
from supervisor.core.planning import default_models, eviction
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import StopCause, WorkerState
from supervisor.core.workers.lifecycle import Trigger, advance
from supervisor.core.workers.termination import settle_trouble, stop_now


def fire(state: SchedulerState, step: Step) -> None:
    """Check every model whose timer is due, and reject the requests that have waited too long."""
    for model_id in state.due(step.now):
        if (model := state.models.get(model_id)) is not None:
            step.about = model_id
            _act_if_due(state, step, model)
    step.about = None
    if state.queue.deadline() <= step.now:
        expire(state, step)


def _act_if_due(state: SchedulerState, step: Step, model: ModelState) -> None:
    if model.crashes.retry_at is not None and step.now >= model.crashes.retry_at:
        reason = "backoff over"
        if model.state is WorkerState.FAILED:
            reason = "the pause after its failure is over"
            step.decide("retry", model.id, reason)
        advance(model, Trigger.RETRY, step.now, reason)
        settle_trouble(state, step, model)
    _give_up_load(state, step, model)
    default_models.return_if_due(state, step, model)
    eviction.end_due_drain(state, step, model)
    if model.state is WorkerState.READY:
        if model.crashes.times and step.now >= model.ready_at + state.limits.backoff_reset_s:
            model.crashes = replace(model.crashes, times=())
        _end_keep_alive(state, step, model)
        partners.end_if_overdue(state, step, model)
    state.update_wanted(model)
    state.touch(model)


def _give_up_load(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Give up a load that an operator ordered, when it has waited as long as a request may; its victims drain until then."""
    asked_at = model.asked_at
    if model.partner is not None:  # a partner sets its own waiting time
        return
    if asked_at is None or model.state is WorkerState.STARTING or step.now < state.admission.gives_up_at(asked_at):
        return
    model.drop_operator_request()
    reason = f"it was asked for and got no place within {state.limits.queue_wait_s:.0f} s"
    if model.state is WorkerState.STOPPED:
        model.life.reason = reason
    step.decide("give_up", model.id, reason)


def _end_keep_alive(state: SchedulerState, step: Step, model: ModelState) -> None:
    if model.keep_alive_at is None or step.now < model.keep_alive_at:
        return
    model.keep_alive_at = None
    if model.in_flight:
        return  # set again when the last request ends
    if state.queue.count(model.queue_key) > 0:
        model.last_used = step.now
    if step.now < state.keep_loaded_until(model, step.now):
        arm_keep_alive(state, model, step.now)
        return
    reason = f"idle for {step.now - model.last_used:.0f} s (keep_alive_s)"
    stop_now(state, step, model, StopCause.IDLE, reason)
    step.decide("stop", model.id, reason)
