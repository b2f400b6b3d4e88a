"""Reports of workers and devices: ready, unready, and how much memory.

Every report identifies its worker by model and generation; reports about older workers are dropped. Memory is read in
parallel to the events, so a reading may be older than the current state: its time is the time when it began.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.admission.dispatch import arm_keep_alive, dispatch, reject_all
from supervisor.core.demand import DEFAULT_DEMAND
from supervisor.core.effects import Learn, LearnLoad
from supervisor.core.events import MemorySampled, WorkerAdopted, WorkerReady, WorkerSample, WorkerUnready
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import MODEL_PLACEHOLDER, DeviceId, Generation, RejectCode, StopCause, WorkerState, on_each
from supervisor.core.workers.lifecycle import Trigger, advance
from supervisor.core.workers.termination import finish_stop, forget, stop_worker

REMOTE_RETRY_S = 10.0

LEARN_STEP = 1.05
"""A model's footprint is learned anew when a reading exceeds the known one by this factor."""


def ready(state: SchedulerState, step: Step, event: WorkerReady) -> None:
    """A worker answers, for the first time or again: dispatch its waiting requests in the same step."""
    model = state.current(event.model, event.generation)
    if model is None or model.state not in {WorkerState.STARTING, WorkerState.READY}:
        return
    if model.spec.remote:
        _mark_reachable(step, model)
    elif model.state is WorkerState.STARTING:
        _record_load(state, step, model)
    model.set_worker(answering=True)
    dispatch(state, step, model)


def adopted(state: SchedulerState, step: Step, event: WorkerAdopted) -> None:
    """Take over a ready worker of a predecessor. The predecessor's requests on it count until each has finished."""
    model = state.models[event.model]
    model.generation = Generation(event.generation - 1)
    if model.has_failed:  # its files were removed after its start, or it failed meanwhile
        advance(model, Trigger.RESET, step.now, "handed over")
    advance(model, Trigger.START, step.now, "handed over", devices=event.devices)
    if not model.spec.remote:
        state.ledger.adopt(model.holder, event.devices, on_each(event.mib, event.devices), step.now)
    advance(model, Trigger.READY, step.now, f"handed over with {len(event.tickets)} running requests")
    model.set_worker(answering=True)
    model.ready_at, model.last_used, model.load_s = event.ready_at, event.last_used, event.load_s
    model.kept_until, model.last_priority = event.kept_until, event.last_priority
    demands = event.demands or (DEFAULT_DEMAND,) * len(event.tickets)
    for ticket, demand in zip(event.tickets, demands, strict=True):
        model.in_flight[ticket] = demand
        state.admission.shares.arrived(demand)
        state.admission.shares.began(ticket, model.id, demand, step.now)
        state.tickets[ticket] = model.id
    state.update_wanted(model)
    step.decide("adopted", model.id, model.life.reason)
    if event.is_unloaded:
        stop_worker(state, step, model, StopCause.OPERATOR, "unloaded by an operator")
    dispatch(state, step, model)
    arm_keep_alive(state, model, step.now)


def _record_load(state: SchedulerState, step: Step, model: ModelState) -> None:
    model.load_s = step.now - model.life.since
    for each in state.replicas(model):
        if not each.has_worker:
            each.load_s = model.load_s
    step.emit(LearnLoad(model.id, model.spec.footprint_key, model.load_s))
    model.crashes = replace(model.crashes, oom_retried=False, refusals=0, given_up=False)
    advance(model, Trigger.READY, step.now, f"loaded in {model.load_s:.1f} s")
    state.ledger.settle(model.holder, step.now)
    step.decide("ready", model.id, model.life.reason)
    if model.crashes.times:
        state.wake(step.now + state.limits.backoff_reset_s, model.id)
    arm_keep_alive(state, model, step.now)


def _mark_reachable(step: Step, model: ModelState) -> None:
    if model.state is WorkerState.STARTING:
        advance(model, Trigger.READY, step.now, "runs elsewhere")
        step.decide("ready", model.id, model.life.reason)
    else:
        model.life.reason = "answers again"
        step.decide("recovered", model.id, model.life.reason)


def unready(state: SchedulerState, step: Step, event: WorkerUnready) -> None:
    """A worker doesn't answer now: new requests wait."""
    model = state.current(event.model, event.generation)
    if model is None:
        return
    if model.spec.is_elsewhere:
        _mark_unreachable(state, step, model, event.reason)
    elif model.state is WorkerState.READY and model.answering:
        model.set_worker(answering=False)
        step.decide("unready", model.id, event.reason)


def _mark_unreachable(state: SchedulerState, step: Step, model: ModelState, reason: str) -> None:
    """A remote model doesn't answer. The end of the outage is unknown, so its requests are rejected."""
    if model.state is WorkerState.STARTING:
        advance(model, Trigger.READY, step.now, reason)
    elif model.state is not WorkerState.READY:
        return
    model.set_worker(answering=False)
    model.life.reason = reason
    step.decide("unready", model.id, reason)
    message = f"{MODEL_PLACEHOLDER}: {reason}"
    reject_all(state, step, model, RejectCode.REMOTE_UNAVAILABLE, message, retry_after_s=REMOTE_RETRY_S)


def sampled(state: SchedulerState, step: Step, event: MemorySampled) -> None:
    """Enter a memory reading in the ledger, and continue with models whose memory is back."""
    stale = {device.id for device in event.devices if device.stale}  # with outdated values of workers
    for worker in event.workers:
        if worker.used_mib is not None and worker.device not in stale:
            step.about = worker.model
            holder = (worker.model, worker.generation)
            state.ledger.measure(holder, worker.device, worker.used_mib)
            if worker.used_mib == 0:
                state.ledger.note_unused(holder, worker.device, event.taken_at)
            _learn_from_sample(state, step, worker, worker.used_mib, event.taken_at)
    step.about = None
    back = [model_id for device in event.devices for model_id in state.ledger.sample(device, event.taken_at)]
    for model_id in dict.fromkeys(back):
        model = state.models[model_id]
        step.about = model_id
        finish_stop(state, step, model)
        if model.removed and model.id in state.models:
            forget(state, step, model)


def _learn_from_sample(state: SchedulerState, step: Step, worker: WorkerSample, used_mib: int, taken_at: float) -> None:
    """Learn the worker's highest measured use, from non-empty readings that began after it was ready.

    The unequal parts of a split model differ from load to load, so learn the sum of all parts.
    """
    model = state.current(worker.model, worker.generation)
    if model is None or model.state is not WorkerState.READY or model.partner is not None:
        return
    if used_mib <= 0 or taken_at <= model.ready_at:
        return
    if not model.spec.spreads:
        _learn_footprint(state, step, model, worker.device, used_mib)
        return
    parts = {
        lease.device: lease.measured_mib or 0
        for lease in state.ledger.leases_of(model.holder)
        if not state.ledger.has_unsampled_worker(lease.device)  # its last reading may be from the time of the load
    } | {worker.device: used_mib}
    if all(parts.get(device) for device in model.devices):
        for device in model.devices:
            _learn_footprint(state, step, model, device, sum(parts.values()))


def _learn_footprint(state: SchedulerState, step: Step, model: ModelState, device: DeviceId, used_mib: int) -> None:
    known = model.spec.learned.get(device)
    if known is None or used_mib > known.mib * LEARN_STEP:
        for each in state.replicas(model):
            each.learn(device, used_mib)
        step.emit(Learn(model.id, device, model.spec.footprint_key, used_mib))


def watch_memory(state: SchedulerState, step: Step) -> None:
    """Warn about memory that isn't returned, and quarantine its device after a longer time."""
    for alert in state.ledger.overdue(step.now):
        step.emit(alert)
        step.decide(alert.code, alert.model, alert.message)
