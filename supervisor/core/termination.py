"""How a worker ends, and what comes after: stopped by us, crashed, or not to be killed; tried again, given up, forgotten.

A worker that was stopped stays STOPPING until its tree is gone and its memory is back. One that ended by itself goes at
once to BACKOFF (tried again later, the pause doubling) or FAILED (ended too often, or can't ever work): its memory may
still be on its way, but that is the ledger's business, not its own. One that was loaded comes back by itself as long as
nothing has to go for it.
"""

from __future__ import annotations

import random

from supervisor.core.lifecycle import Step
from supervisor.core.messages import listed
from supervisor.core.state import Record, Turn, World
from supervisor.core.types import (
    Alert,
    Crash,
    CrashClass,
    CutRequest,
    Decided,
    RejectCode,
    State,
    StopCause,
    StopWorker,
    WorkerExited,
    WorkerUnkillable,
)

HOPELESS = frozenset({CrashClass.BAD_ARGUMENTS})
"""A start that failed like this fails the same way again, so it isn't tried again by itself."""


def take_down(world: World, turn: Turn, record: Record, cause: StopCause, reason: str, *, force: bool = False) -> None:
    """End the worker: after its running requests within the drain time, or at once."""
    if not record.has_worker:
        return
    if record.state is State.STOPPING:
        if force and not record.exited:
            turn.emit(StopWorker(record.id, record.generation, cause, reason, force=True))
        return
    if record.in_flight and not force:
        record.stop_reason, record.stop_cause = reason, cause
        record.drain_until = turn.now + world.limits.drain_s
        world.wake(record.drain_until, record.id)
        if record.state is State.READY:
            record.life.step(Step.DRAIN, turn.now, reason)
        turn.decide("drain", record.id, f"{reason}; {len(record.in_flight)} in flight")
        return
    cut(turn, record, reason)
    world.stop(turn, record, cause, reason, force=force or record.state is State.STARTING)
    turn.decide("stop", record.id, reason)


def cut(turn: Turn, record: Record, reason: str) -> None:
    """Its running requests end now."""
    for ticket in record.in_flight:
        turn.emit(CutRequest(ticket, reason))


def exited(world: World, turn: Turn, event: WorkerExited) -> None:
    """Its tree is gone: what was in flight is over, and whatever it was up to is decided by why it ended."""
    record = world.current(event.model, event.generation)
    if record is None or record.exited:
        return
    for ticket in record.in_flight:
        world.tickets.pop(ticket, None)
    record.in_flight.clear()
    record.answering = False
    record.stuck = False
    record.exited = True
    if not record.spec.remote:
        world.ledger.returning(record.holder, turn.now)
    if record.state is State.STOPPING:
        settle_stopped(world, turn, record)
    else:
        _crashed(world, turn, record, event.crash or Crash(CrashClass.UNKNOWN, "it ended although nobody stopped it"))


def settle_stopped(world: World, turn: Turn, record: Record) -> None:
    """STOPPING ends when the tree is gone *and* its memory is back; then whatever waited for that happens."""
    if record.state is not State.STOPPING or world.ledger.holds(record.holder):
        return
    record.life.step(Step.GONE, turn.now, record.life.reason)
    record.stop_reason = None
    record.devices = ()
    _adopt_spec(record)
    if record.retired:
        forget(world, turn, record)
    else:
        world.want(record)


def _crashed(world: World, turn: Turn, record: Record, crash: Crash) -> None:
    limits = world.limits
    was_loaded = record.state is not State.STARTING
    record.crash = crash
    record.stop_reason = record.drain_until = None
    turn.decide("crash", record.id, f"{crash.kind}: {crash.summary}")
    if crash.kind is CrashClass.NOT_INSTALLED and not was_loaded:
        record.life.step(Step.GONE, turn.now, crash.summary)
        world.reject_all(turn, record, RejectCode.RUNTIME_NOT_INSTALLED, crash.summary)
    elif crash.kind is CrashClass.OUT_OF_MEMORY and not was_loaded and not record.oom_retried:
        record.oom_retried = True
        record.life.step(Step.GONE, turn.now, "ran out of memory while loading; tried once more with more room")
    else:
        record.restore = record.restore or was_loaded
        record.crashes.append(turn.now)
        while turn.now - record.crashes[0] > limits.crash_window_s:
            record.crashes.popleft()
        if crash.kind in HOPELESS or len(record.crashes) >= limits.crash_limit:
            _fail(world, turn, record, crash)
        else:
            _back_off(world, turn, record, crash)
    _adopt_spec(record)
    if record.retired:
        forget(world, turn, record)
    else:
        world.want(record)


def _fail(world: World, turn: Turn, record: Record, crash: Crash) -> None:
    window = f"{len(record.crashes)} times in {world.limits.crash_window_s / 60:.0f} min"
    times = "" if crash.kind in HOPELESS else f" {window}"
    record.life.step(Step.FAIL, turn.now, f"failed{times}: {crash.summary}")
    message = f"{record.id} does not start: {crash.summary}. Fix the cause, then: llmux load {record.id}"
    world.reject_all(turn, record, RejectCode.MODEL_FAILED, message, retry_after_s=60.0, detail=crash.log_tail)
    turn.emit(Alert("model.failed", record.life.reason, model=record.id))


def _back_off(world: World, turn: Turn, record: Record, crash: Crash) -> None:
    limits = world.limits
    doublings = min(len(record.crashes) - 1, 64)  # a float overflows beyond a thousand
    delay = min(limits.backoff_max_s, limits.backoff_first_s * 2.0**doublings)
    # Deterministic, so that a replay makes the same decision; different for each model, so that they don't march in step.
    noise = random.Random(f"{record.id}:{record.generation}").uniform(-1.0, 1.0)  # noqa: S311 (not for secrets)
    delay *= 1.0 + limits.backoff_jitter * noise
    record.retry_at = turn.now + delay
    record.life.step(Step.CRASH, turn.now, f"{crash.summary}; next try in {delay:.1f} s")
    world.wake(record.retry_at, record.id)


def unkillable(world: World, turn: Turn, event: WorkerUnkillable) -> None:
    """SIGKILL did not end it: its device takes nothing new until it is gone, and nobody waits for it."""
    record = world.current(event.model, event.generation)
    if record is None or record.exited:
        return
    record.stuck = True
    message = f"{record.id}: {event.reason}; nothing new is loaded on {listed(record.devices)} until it is gone"
    world.ledger.quarantine(record.holder, message)
    for device in record.devices:
        turn.emit(Alert("device.quarantined", message, device=device, model=record.id))
    turn.decide("quarantine", record.id, message)
    world.reject_all(turn, record, RejectCode.LOAD_FAILED, message, retry_after_s=60.0)


def _adopt_spec(record: Record) -> None:
    if record.next_spec is not None:
        record.spec, record.next_spec = record.next_spec, None


def forget(world: World, turn: Turn, record: Record) -> None:
    """Drop a removed model, once nothing of it is left; until then every reading of the memory comes back here."""
    world.want(record)
    if record.has_worker or world.ledger.holds_any(record.id):
        return
    world.forget(record)
    turn.emit(Decided("forgotten", record.id, "removed from the configuration"))
