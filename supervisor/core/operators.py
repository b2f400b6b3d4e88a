"""Orders of operators: load, unload, cancel a load, pin, change settings or the configuration, shut down.

A load ends with a loaded model or with a reason for the failure. A load without a place is given up after the longest
time that a request may wait. A changed definition needs another worker: the running one ends after its requests, then
the model returns with its new specification if it was in use.
"""

from __future__ import annotations

import math

from supervisor.core.admission.dispatch import arm_keep_alive, dispatch, reject_all, resume
from supervisor.core.events import Configured, LoadCancelled, LoadRequested, PinRequested, Respecified, UnloadRequested
from supervisor.core.model_state import Change, Life, ModelState
from supervisor.core.planning import default_models
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import MODEL_PLACEHOLDER, SERVES, Devices, ModelSpec, RejectCode, StopCause, WorkerState
from supervisor.core.workers import replicas
from supervisor.core.workers.lifecycle import TABLE, Trigger, advance
from supervisor.core.workers.termination import finish_stop, forget, remove, settle_trouble, stop_now, stop_worker


def load(state: SchedulerState, step: Step, event: LoadRequested) -> None:
    """Load the model regardless of the traffic, and forget its earlier failures."""
    model = state.models.get(event.model)
    if model is None or model.removed or state.shutting_down:
        return
    for each in state.replicas(model):
        if not each.spec.trouble:
            _reset_failures(step, each, "reset by an operator")
        each.unloaded_by_operator = False
        each.last_wanted_at = -math.inf
        state.update_wanted(each)
    if model.spec.trouble and model.state is WorkerState.FAILED:
        return
    if model.drain is not None and model.drain.is_ordered and model.change is None:
        resume(state, step, model, "an operator asked for it again")
    elif model.state is not WorkerState.READY and state.is_served_elsewhere(model):
        model.request_restore()
    elif model.state is not WorkerState.READY:
        since = model.request_load(step.now)
        state.wake(state.admission.gives_up_at(since), model.id)
    state.update_wanted(model)


def _reset_failures(step: Step, model: ModelState, reason: str) -> None:
    model.mistake = None
    if (model.state, Trigger.RESET) in TABLE:
        advance(model, Trigger.RESET, step.now, reason)


def unload(state: SchedulerState, step: Step, event: UnloadRequested) -> None:
    """Unload the model. Only a new request or load order loads it again."""
    model = state.models.get(event.model)
    if model is None:
        return
    for each in reversed(state.replicas(model)):  # the primary last: then no other replica serves its queue
        _unload_replica(state, step, each, event.reason, force=event.force)
    if event.spec is not None:
        _apply_spec_to_replicas(state, step, event.spec, event.reason)


def _unload_replica(state: SchedulerState, step: Step, model: ModelState, reason: str, *, force: bool) -> None:
    model.load_intent = None
    model.unloaded_by_operator = True
    message = f"{MODEL_PLACEHOLDER} was {reason}."
    reason = "llmux is shutting down" if state.shutting_down else reason
    if force or not any(each.state in SERVES for each in state.replicas(model)):
        reject_all(state, step, model, RejectCode.MODEL_UNLOADED, message, retry_after_s=5.0)
    stop_worker(state, step, model, StopCause.OPERATOR, reason, force=force)
    if not model.spec.trouble:
        _reset_failures(step, model, reason)
    state.update_wanted(model)


def cancel_load(state: SchedulerState, step: Step, event: LoadCancelled) -> None:
    """Cancel a load, and reject its requests unless another replica serves them. A new request or load order loads it again."""
    model = state.models.get(event.model)
    if model is None or model.partner is not None or model.state in {*SERVES, WorkerState.FAILED}:
        return
    if model.state is not WorkerState.STARTING and model.load_intent is None and not state.waiting_for(model):
        return
    reason = "cancelled by an operator"
    model.load_intent = None
    model.unloaded_by_operator = True
    step.decide("cancel", model.id, f"load {reason}")
    if model.state is WorkerState.STARTING:
        stop_now(state, step, model, StopCause.OPERATOR, f"its load was {reason}", force=True)
    else:
        _reset_failures(step, model, f"its load was {reason}")
    if not state.is_served_elsewhere(model):
        message = f"The load of {MODEL_PLACEHOLDER} was {reason}."
        reject_all(state, step, state.models[model.queue_key], RejectCode.MODEL_UNLOADED, message, retry_after_s=5.0)
    state.update_wanted(model)


def pin(state: SchedulerState, step: Step, event: PinRequested) -> None:
    """Pin a model, which is then never evicted, or unpin it."""
    model = state.models.get(event.model)
    if model is None:
        return
    is_pinned = model.spec.pin if event.pin is None else event.pin
    if event.pin is not None or is_pinned != model.pinned:
        step.decide("pin" if is_pinned else "unpin", model.id, "asked by an operator")
    for each in state.replicas(model):
        if not each.spec.extra:
            each.pin = event.pin
        state.touch(each)
        arm_keep_alive(state, each, step.now)
    state.wanted.plan_all_again()


def respecify(state: SchedulerState, step: Step, event: Respecified) -> None:
    """Give the model other settings from now on."""
    model = state.models.get(event.spec.id)
    if model is not None and not model.removed:
        _apply_spec_to_replicas(state, step, event.spec, "an operator loads it with other settings")


def _apply_spec_to_replicas(state: SchedulerState, step: Step, spec: ModelSpec, why: str) -> None:
    """Apply a specification to the model and all its replicas."""
    for each in replicas.expanded((spec,), state.limits):
        _apply_spec(state, step, each, why)
        state.touch(state.models[each.id])
    state.wanted.give_up_places()  # the model may no longer be allowed on its device


def configure(state: SchedulerState, step: Step, event: Configured) -> None:
    """Apply the whole configuration, at boot or after a reload."""
    state.use_policy(state.admission.configured(event.limits, event.policy))
    state.ledger.configure(event.devices, event.limits)
    specs = tuple(replicas.expanded(event.models, event.limits))
    named = {spec.id for spec in specs}
    state.groups = replicas.groups(specs)
    for spec in specs:
        step.about = spec.id
        _apply_spec(state, step, spec, "its configuration changed")
    for model in list(state.models.values()):
        step.about = model.id
        if model.id not in named and model.partner is None:
            remove(state, step, model)
    for model in list(state.models.values()):
        step.about = model.id
        state.touch(model)
        finish_stop(state, step, model)  # no model waits for the memory of a removed device
        if model.removed and model.id in state.models:
            forget(state, step, model)
    for model in state.models.values():
        step.about = model.id
        replicas.refuse_unserved(state, step, model)
        default_models.arm(state, step, model)
    step.about = None
    state.wanted.give_up_places()  # a device may have been removed


def _apply_spec(state: SchedulerState, step: Step, spec: ModelSpec, why: str) -> None:
    model = state.models.get(spec.id)
    if model is None:
        model = ModelState(
            spec, Life(step.now), generation=state.last_forgotten, last_used=step.now, load_s=spec.load_s
        )
        state.models[spec.id] = model
        if spec.preload or spec.is_elsewhere:
            model.request_restore()
        settle_trouble(state, step, model)
    elif model.has_worker and not may_keep_worker(model.spec, model.devices, spec):
        model.change = Change(spec)
        is_going = model.state is WorkerState.STOPPING or (model.drain is not None and model.drain.is_ordered)
        if not is_going:  # else keep the first reason
            model.request_restore()
            stop_worker(state, step, model, StopCause.CONFIGURATION, why)
    else:
        _apply_spec_at_once(state, step, model, spec, why)
    if (first := state.models.get(spec.replica_of or spec.id)) is not None:
        model.pin = None if spec.extra else first.pin
    state.update_wanted(model)


def _apply_spec_at_once(state: SchedulerState, step: Step, model: ModelState, spec: ModelSpec, why: str) -> None:
    """Apply a specification at once: the model has no worker, or its worker may keep running."""
    is_mended = bool(model.spec.trouble) and not spec.trouble
    if is_mended and model.state is WorkerState.FAILED:
        why = "what was missing is there"
        step.decide("recovered", model.id, why)
    if (model.spec.definition, model.spec.trouble) != (spec.definition, spec.trouble):
        _reset_failures(step, model, why)
        if spec.remote:
            model.request_restore()
    if spec.preload and not model.spec.preload and not model.has_worker:
        model.request_restore()
    model.specify(spec)
    model.change = None
    settle_trouble(state, step, model)
    dispatch(state, step, model)
    arm_keep_alive(state, model, step.now)


def may_keep_worker(running: ModelSpec, devices: Devices, spec: ModelSpec) -> bool:
    """Whether a worker started with the specification `running` on `devices` may keep running under `spec`."""
    return running.definition == spec.definition and (not spec.devices or set(devices) <= set(spec.devices))


def shut_down(state: SchedulerState, step: Step) -> None:
    """Reject all requests from now on, drain, and stop all workers."""
    state.shutting_down = True
    for model in list(state.models.values()):
        step.about = model.id
        message = "llmux is shutting down; try again in a moment."
        reject_all(state, step, model, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0)
        state.update_wanted(model)
        stop_worker(state, step, model, StopCause.SHUTDOWN, "llmux is shutting down")
