"""A request's way through the scheduler, by the numbers of `scheduler`: refused, dispatched, queued, finished."""

from __future__ import annotations

from supervisor.core.lifecycle import Step
from supervisor.core.reports import REMOTE_RETRY_S
from supervisor.core.state import Record, Turn, World
from supervisor.core.types import (
    Reject,
    RejectCode,
    RequestArrived,
    RequestFinished,
    State,
    StopCause,
)


def arrived(world: World, turn: Turn, event: RequestArrived) -> bool:
    """Refuse it, dispatch it, or queue it. True when its model is wanted only now."""
    # 1.
    record = world.records.get(event.model)
    if record is None or record.retired:
        turn.emit(Reject(event.ticket, RejectCode.MODEL_NOT_FOUND, f"There is no model {event.model!r}."))
        return False
    if world.shutting_down:
        message = "llmux is shutting down; try again in a moment."
        turn.emit(Reject(event.ticket, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0))
        return False
    if record.state is State.FAILED or record.stuck:
        turn.emit(_failed(event, record))
        return False
    if record.spec.remote and record.state is State.READY and not record.answering:
        message = f"{record.id}: {record.life.reason}"
        turn.emit(Reject(event.ticket, RejectCode.REMOTE_UNAVAILABLE, message, REMOTE_RETRY_S))
        return False
    # 2.
    idle_queue = world.queue.count(record.id) == 0
    if record.state is State.READY and record.answering and idle_queue and not world.is_full(record):
        world.assign(turn, record, event.ticket)
        return False
    # 3.
    full = world.queue.push(event.ticket, event.model, event.priority, turn.now)
    if full is not None:
        retry_after_s = min(120.0, max(1.0, record.load_s or 1.0))
        message = f"The queue is full: {full}. Try again in {retry_after_s:.0f} s."
        turn.emit(Reject(event.ticket, RejectCode.QUEUE_FULL, message, retry_after_s))
        return False
    known = record.id in world.wanted
    world.want(record)
    return not known and record.id in world.wanted


def finished(world: World, turn: Turn, event: RequestFinished) -> bool:
    """4. It is over: its place is free, or nobody waits for its model any more. True when that may change a plan."""
    model = world.tickets.pop(event.ticket, None)
    if model is None:  # it was still queued, or its worker is gone already
        waiting = world.queue.remove(event.ticket)
        if waiting is None:
            return False
        was_wanted = waiting.model in world.wanted
        _left(world, turn, world.records[waiting.model])
        return was_wanted and waiting.model not in world.wanted
    record = world.records[model]
    del record.in_flight[event.ticket]
    record.last_used = turn.now
    if world.queue.count(model) > 0:
        world.dispatch(turn, record)
    if record.in_flight:
        return False
    world.keep_alive(record)
    if record.state is State.DRAINING and record.stop_reason is not None:
        world.stop(turn, record, record.stop_cause, record.stop_reason)
    elif record.state is State.DRAINING:
        record.life.step(Step.RESUME, turn.now, "idle")  # place() stops it in this same turn if it is still claimed
        return True
    return bool(world.wanted)


def expire(world: World, turn: Turn) -> None:
    """Refuse those who have waited too long."""
    waited = world.limits.queue_wait_s
    for waiting in world.queue.expired(turn.now):
        record = world.records[waiting.model]
        message = f"Waited {waited:.0f} s for {record.id} without getting a turn. To see why: llmux why {record.id}"
        turn.emit(Reject(waiting.ticket, RejectCode.QUEUE_TIMEOUT, message, 30.0))
        _left(world, turn, record)


def _left(world: World, turn: Turn, record: Record) -> None:
    """One fewer waits for the model. A load that is for nobody now is stopped, unless most of it is behind us."""
    world.want(record)
    needless = record.asked_at is None and not record.restore and world.queue.count(record.id) == 0
    if record.state is not State.STARTING or not needless:
        return
    if record.load_s is not None and turn.now - record.life.since > record.load_s / 2:
        return
    reason = "nobody waits for it any more"
    world.stop(turn, record, StopCause.UNWANTED, reason, force=True)
    turn.decide("cancel", record.id, f"load cancelled: {reason}")


def _failed(event: RequestArrived, record: Record) -> Reject:
    what = record.crash.summary if record.crash is not None else record.life.reason
    message = f"{record.id} does not start: {what}. Fix the cause, then: llmux load {record.id}"
    tail = record.crash.log_tail if record.crash is not None else ()
    return Reject(event.ticket, RejectCode.MODEL_FAILED, message, 60.0, tail)
