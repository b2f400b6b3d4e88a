"""The end of a worker (stop, crash, unkillable process) and its consequences: retry, failure, or removal of the model.

A stopped worker stays STOPPING until its process tree has ended and its memory is back. The model of a crashed worker
enters BACKOFF at once (retried later; the pause doubles each time) or FAILED (too many crashes, or hopeless); the ledger
tracks the memory still to be returned. A model that was loaded, or failed with a cause that may pass, is reloaded
automatically if this needs no eviction. If the host refuses a start (descriptors, disk space), the model isn't at fault:
the start is retried and doesn't count as a crash.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from supervisor.core.admission.dispatch import reject_all
from supervisor.core.effects import Alert, CutRequest, Decided, Learn, StopWorker
from supervisor.core.events import WorkerExited, WorkerUnkillable
from supervisor.core.messages import devices_listed, listed, seconds
from supervisor.core.model_state import Change, Drain, ModelState, Worker
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import (
    MODEL_PLACEHOLDER,
    Crash,
    CrashClass,
    DeviceId,
    ModelId,
    RejectCode,
    StopCause,
    WorkerState,
)
from supervisor.core.workers.lifecycle import Trigger, advance

OUT_OF_MEMORY_EXTRA = 1.25
"""Factor on the footprint of a model whose start ran out of memory."""

TROUBLE_RETRY_S = 10.0
"""Seconds until a client may retry a request for a model whose trouble can be repaired."""

HOPELESS = frozenset({CrashClass.BAD_ARGUMENTS})
"""Such a start would fail again in the same way, so llmux doesn't retry it automatically."""

FAILS_AT_ONCE = HOPELESS | {CrashClass.UNUSABLE}
"""The model fails after one such start."""


def stop_worker(
    state: SchedulerState, step: Step, model: ModelState, cause: StopCause, reason: str, *, force: bool = False
) -> None:
    """Stop the worker after its running requests, at the latest after the drain time; with `force` at once."""
    if not model.has_worker:
        return
    if model.state is WorkerState.STOPPING:
        if force and not model.exited:
            step.emit(StopWorker(model.id, model.generation, cause, reason, force=True))
        return
    if model.in_flight and not force:
        until = step.now + state.admission.ordered_drain_s(model.spec)
        if model.drain is not None:  # a repeated order doesn't extend the time
            until = min(until, model.drain.until)
        state.wake(until, model.id)
        drain = Drain(cause, reason, step.now, until)
        if model.state is WorkerState.READY:
            advance(model, Trigger.DRAIN, step.now, reason, drain=drain)
        else:
            model.drain = drain
        step.decide("drain", model.id, f"{reason}; {len(model.in_flight)} in flight")
        return
    cut_requests(step, model, reason)
    stop_now(state, step, model, cause, reason, force=force or model.state is WorkerState.STARTING)
    step.decide("stop", model.id, reason)


def stop_now(
    state: SchedulerState, step: Step, model: ModelState, cause: StopCause, reason: str, *, force: bool = False
) -> None:
    """Stop the worker now. Its memory stays leased until its process tree has ended and the device shows the memory free."""
    advance(model, Trigger.STOP, step.now, reason)
    if not model.spec.remote:
        state.ledger.stopping(model.holder)
    if model.partner is not None:  # another program's process can't be stopped here
        model.worker = Worker(model.devices, exited=True)
        state.ledger.returning(model.holder, step.now)
    else:
        step.emit(StopWorker(model.id, model.generation, cause, reason, force))


def stop_reason(model: ModelState, drain: Drain) -> str:
    """The reason for stopping the model at the end of this drain."""
    return drain.reason if drain.is_ordered else f"evicted for {model.claimed_by}"


def cut_requests(step: Step, model: ModelState, reason: str) -> None:
    """Cut the model's running requests."""
    for ticket in model.in_flight:
        step.emit(CutRequest(ticket, reason))


def exited(state: SchedulerState, step: Step, event: WorkerExited) -> None:
    """A worker's process tree has ended, and so have its requests. The cause decides the model's next state."""
    model = state.current(event.model, event.generation)
    if model is None or model.exited:
        return
    for ticket in model.in_flight:
        del state.tickets[ticket]
        state.admission.shares.ended(ticket, step.now)
    model.in_flight.clear()
    if not model.spec.remote:
        state.ledger.returning(model.holder, step.now)
    if model.drain is not None and model.drain.is_ordered:  # its stop was ordered anyway: no retry
        if event.crash is not None:
            step.decide("crash", model.id, f"{event.crash.kind}: {event.crash.operator_summary}")
        advance(model, Trigger.STOP, step.now, model.drain.reason)
    if model.state is WorkerState.STOPPING:
        model.worker = Worker(model.devices, exited=True)
        finish_stop(state, step, model)
    else:
        _handle_crash(
            state, step, model, event.crash or Crash(CrashClass.UNKNOWN, "it ended although nobody stopped it")
        )


def finish_stop(state: SchedulerState, step: Step, model: ModelState) -> None:
    """End STOPPING if the process tree has ended *and* its memory is back; then apply waiting changes."""
    if model.state is not WorkerState.STOPPING or state.ledger.holds(model.holder):
        return
    if model.mistake is not None:
        _fail_by_mistake(state, step, model, model.mistake)
    else:
        advance(model, Trigger.RELEASED, step.now, model.life.reason)
    _apply_change(state, step, model)


def _handle_crash(state: SchedulerState, step: Step, model: ModelState, crash: Crash) -> None:
    was_loaded = model.state is not WorkerState.STARTING
    model.crashes = replace(model.crashes, last=crash)
    step.decide("crash", model.id, f"{crash.kind}: {crash.operator_summary}")
    if crash.kind is CrashClass.NOT_INSTALLED and not was_loaded:
        advance(model, Trigger.RELEASED, step.now, crash.operator_summary)
        reject_all(state, step, model, RejectCode.RUNTIME_NOT_INSTALLED, crash.summary)
    elif (ran_out := crash.kind is CrashClass.OUT_OF_MEMORY and not was_loaded) and not model.crashes.oom_retried:
        _retry_with_more(state, step, model)
    else:
        if was_loaded:
            model.request_restore()
        if _count_crash(state, step, model, crash) or ran_out:
            _fail_model(state, step, model, crash)
        else:
            _back_off(state, step, model, crash)
    _apply_change(state, step, model)


def _retry_with_more(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Retry a start that ran out of memory once, with a larger footprint: it was too small, or another program took memory."""
    model.crashes = replace(model.crashes, oom_retried=True)
    changes: list[str] = []
    leases = state.ledger.leases_of(model.holder)
    if model.spread(state.ledger.devices()) is not None:  # its parts differ from load to load: raise the total
        mib = int(sum(lease.reserved_mib for lease in leases) * OUT_OF_MEMORY_EXTRA)
        for lease in leases:
            _raise_footprint(state, step, model, lease.device, mib)
        changes.append(f"{mib} MiB in all instead of {sum(lease.mib for lease in leases)}")
    else:
        for lease in leases:
            device = state.ledger.view(lease.device)
            mib = min(int(lease.reserved_mib * OUT_OF_MEMORY_EXTRA), device.usable_mib)
            if mib > lease.mib:
                _raise_footprint(state, step, model, lease.device, mib)
                changes.append(f"{mib} MiB on {device.label} instead of {lease.mib}")
    reason = f"ran out of memory while loading; tried once more{', with ' * bool(changes)}{listed(changes)}"
    advance(model, Trigger.RELEASED, step.now, reason)
    step.decide("raise", model.id, reason)


def _raise_footprint(state: SchedulerState, step: Step, model: ModelState, device: DeviceId, mib: int) -> None:
    for each in state.replicas(model):
        each.raise_footprint(device, mib)
    step.emit(Learn(model.id, device, model.spec.footprint_key, mib, raised=True))


def _count_crash(state: SchedulerState, step: Step, model: ModelState, crash: Crash) -> bool:
    """Count the crash. Returns whether the model fails now."""
    if crash.kind is CrashClass.HOST:
        model.crashes = replace(model.crashes, refusals=model.crashes.refusals + 1)
        return False
    recent = (at for at in model.crashes.times if step.now - at <= state.limits.crash_window_s)
    model.crashes = replace(model.crashes, times=(*recent, step.now), refusals=0)
    is_too_often = model.crashes.given_up or len(model.crashes.times) >= state.limits.crash_limit
    return is_too_often or crash.kind in FAILS_AT_ONCE


def _fail_model(state: SchedulerState, step: Step, model: ModelState, crash: Crash) -> None:
    """Give the model up until an operator loads it or, if the cause may pass, until a long pause is over."""
    is_hopeless = crash.kind in HOPELESS
    retry_at = None if is_hopeless else step.now + state.limits.failed_retry_s
    window = f" {len(model.crashes.times)} times in {state.limits.crash_window_s / 60:.0f} min"
    times = "" if crash.kind in FAILS_AT_ONCE or model.crashes.given_up else window
    if crash.kind is CrashClass.OUT_OF_MEMORY and model.crashes.oom_retried:
        times = " again with more memory"
    then = "" if is_hopeless else f"; next try in {seconds(state.limits.failed_retry_s)}"
    advance(model, Trigger.FAIL, step.now, f"failed{times}: {crash.operator_summary}{then}", retry_at=retry_at)
    model.crashes = replace(model.crashes, given_up=True)
    _reject_requests(state, step, model)
    if retry_at is not None:
        model.request_restore()
        state.wake(retry_at, model.id)
    step.decide("failed", model.id, model.life.reason)
    step.emit(Alert("model.failed", model.life.reason, model=model.id))


def mishandled(state: SchedulerState, step: Step, models: tuple[ModelId, ...], why: str) -> None:
    """Fail the models that llmux mishandled: at once, or after their worker has completed its requests and ended."""
    crash = Crash(CrashClass.UNKNOWN, f"llmux made a mistake over it ({why}), which its log tells")
    for model in [state.models[name] for name in models if name in state.models]:
        step.about = model.id
        if model.partner is not None:
            if not model.removed:
                remove(state, step, model, crash.summary)
        elif model.has_worker:
            model.mistake = crash
            _reject_requests(state, step, model)
            stop_worker(state, step, model, StopCause.MISTAKE, crash.summary)
        elif not model.removed and (model.state is not WorkerState.FAILED or model.life.since < step.now):
            _fail_by_mistake(state, step, model, crash)
        if model.id in state.models:
            state.update_wanted(model)
            state.touch(model)
    step.about = None


def _fail_by_mistake(state: SchedulerState, step: Step, model: ModelState, crash: Crash) -> None:
    model.crashes = replace(model.crashes, last=crash, given_up=True)
    _count_crash(state, step, model, crash)
    _fail_model(state, step, model, crash)


def _reject_requests(state: SchedulerState, step: Step, model: ModelState) -> None:
    refused = failure_rejection(model, step.now)
    reject_all(state, step, model, RejectCode.MODEL_FAILED, refused.message, retry_after_s=refused.retry_after_s)


class Failed(NamedTuple):
    """The rejection for clients of a failed model."""

    message: str
    retry_after_s: float | None  # None: no automatic retry


def refusal(state: SchedulerState, model: ModelState, now: float) -> tuple[RejectCode, str, float | None] | None:
    """The rejection of a request that only this model could serve: code, message, retry_after_s. None: the model may be loaded."""
    if model.stuck and model.spec.remote:
        return RejectCode.LOAD_FAILED, f"{MODEL_PLACEHOLDER} can't be started: its last worker can't be ended", None
    if model.stuck:
        device = state.ledger.view(model.devices[0])
        blocked = state.ledger.blocked(device.id, model.id)
        return RejectCode.DEVICE_QUARANTINED, f"{MODEL_PLACEHOLDER} can't be loaded: {device.label} is {blocked}", None
    return (RejectCode.MODEL_FAILED, *failure_rejection(model, now)) if model.has_failed else None


def failure_rejection(model: ModelState, now: float) -> Failed:
    """Why the model doesn't start, without worker output, and when to retry."""
    if model.spec.trouble:
        return Failed(
            f"{MODEL_PLACEHOLDER} can't run here: {model.spec.trouble}. It is served once that is mended.",
            TROUBLE_RETRY_S,
        )
    crash = model.mistake or model.crash
    cause = crash.summary if crash is not None else model.life.reason
    if crash is not None and crash.quote:
        cause += f". Its last words: llmux logs {MODEL_PLACEHOLDER}{model.id.removeprefix(model.queue_key)}"
    if model.crashes.retry_at is None:
        remedy = f"Fix the cause, then: llmux load {MODEL_PLACEHOLDER}"
        return Failed(f"{MODEL_PLACEHOLDER} does not start: {cause}. {remedy}", None)
    in_s = max(1.0, model.crashes.retry_at - now)
    remedy = f"It is tried again in {seconds(in_s)}; at once with: llmux load {MODEL_PLACEHOLDER}"
    return Failed(f"{MODEL_PLACEHOLDER} does not start: {cause}. {remedy}", in_s)


def settle_trouble(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Fail a model that can't run on this machine now, until its specification has no `trouble`.

    A running worker continues. The model keeps its load intent for the time after the trouble.
    """
    if not model.spec.trouble or model.state is not WorkerState.STOPPED:
        return
    intent = model.load_intent
    model.crashes = replace(model.crashes, last=Crash(CrashClass.UNUSABLE, model.spec.trouble), times=(step.now,))
    advance(model, Trigger.FAIL, step.now, f"can't run here: {model.spec.trouble}")
    refused = failure_rejection(model, step.now)
    reject_all(state, step, model, RejectCode.MODEL_FAILED, refused.message, retry_after_s=refused.retry_after_s)
    model.load_intent = intent
    step.decide("failed", model.id, model.life.reason)
    step.emit(Alert("model.failed", model.life.reason, model=model.id))


def _back_off(state: SchedulerState, step: Step, model: ModelState, crash: Crash) -> None:
    limits = state.limits
    crashes = model.crashes
    doublings = min((crashes.refusals or len(crashes.times)) - 1, 64)  # a float overflows at about 1000
    delay = min(limits.backoff_max_s, limits.backoff_first_s * 2.0**doublings)
    # Deterministic, for replays; different for each model, so that they don't all retry at once.
    noise = random.Random(f"{model.id}:{model.generation}").uniform(-1.0, 1.0)  # noqa: S311 (not for secrets)
    delay *= 1.0 + limits.backoff_jitter * noise
    retry_at = step.now + delay
    reason = f"{crash.operator_summary}; next try in {delay:.1f} s"
    advance(model, Trigger.CRASH, step.now, reason, retry_at=retry_at)
    state.wake(retry_at, model.id)


def unkillable(state: SchedulerState, step: Step, event: WorkerUnkillable) -> None:
    """SIGKILL did not end the worker: quarantine its devices until it ends, and reject its waiting requests."""
    model = state.current(event.model, event.generation)
    if model is None or model.exited:
        return
    model.set_worker(stuck=True)
    devices = () if model.spec.remote else model.devices
    where = devices_listed([state.ledger.view(device) for device in devices])
    why = f"can't be ended: {event.reason}{f'; nothing new is loaded on {where} until it is gone' if where else ''}"
    state.ledger.quarantine(model.holder, why)
    message = f"{model.id}'s worker {why}"
    for device in devices:
        step.emit(Alert("device.quarantined", message, device=device, model=model.id))
    step.decide("quarantine", model.id, message)
    reject_all(state, step, model, RejectCode.LOAD_FAILED, f"{MODEL_PLACEHOLDER}'s worker {why}")


def _apply_change(state: SchedulerState, step: Step, model: ModelState) -> None:
    """After the end of the model's worker, apply a changed specification, or forget a removed model."""
    if model.removed:
        forget(state, step, model)
        return
    if model.change is not None and model.change.spec is not None:
        model.specify(model.change.spec)
        model.change = None
    settle_trouble(state, step, model)
    state.update_wanted(model)


def remove(
    state: SchedulerState, step: Step, model: ModelState, reason: str = "removed from the configuration"
) -> None:
    """Remove a model that is no longer configured, or a partner with an ended lease; forget it without worker and leases."""
    model.change = Change(None)
    message = f"{MODEL_PLACEHOLDER} was removed from the configuration."
    reject_all(state, step, model, RejectCode.MODEL_NOT_FOUND, message)
    if model.has_worker:
        stop_worker(state, step, model, StopCause.CONFIGURATION, reason)
    else:
        forget(state, step, model)


def forget(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Drop a removed model if it has no worker and no leases; else every memory reading tries again.

    If the model is configured again, its generations continue, so that no late message matches the new worker.
    """
    state.update_wanted(model)
    if model.has_worker or state.ledger.holds_any(model.id):
        return
    del state.models[model.id]
    state.admission.shares.forget(model.id)
    state.last_forgotten = max(state.last_forgotten, model.generation)
    if model.partner is None:
        step.emit(Decided("forgotten", model.id, "removed from the configuration"))
