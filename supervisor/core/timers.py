"""What only time brings: the end of a backoff, of a drain, of an idle model's keep-alive, of anybody's patience.

A timer says only "look at this model"; what is due follows from the model's state, so that a late or needless one does
no harm.
"""

from __future__ import annotations

from supervisor.core.lifecycle import Step
from supervisor.core.requests import expire
from supervisor.core.state import Record, Turn, World
from supervisor.core.termination import cut
from supervisor.core.types import (
    State,
    StopCause,
)


def ring(world: World, turn: Turn) -> bool:
    """See to everything that is due; True when anything was."""
    if turn.now < world.next_wake() and turn.now < world.queue.deadline():
        return False
    rang = False
    for model in world.due(turn.now):
        if (record := world.records.get(model)) is not None:
            _look(world, turn, record)
            rang = True
    if world.queue.deadline() <= turn.now:
        expire(world, turn)
        rang = True
    return rang


def _look(world: World, turn: Turn, record: Record) -> None:
    if record.state is State.BACKOFF and turn.now >= record.retry_at:
        record.life.step(Step.RETRY, turn.now, "backoff over")
    _give_up(world, turn, record)
    if record.state is State.DRAINING and record.drain_until is not None and turn.now >= record.drain_until:
        reason = record.stop_reason or "drain time is over"
        cut(turn, record, reason)
        world.stop(turn, record, record.stop_cause, reason)
        cut_after = f"cut {len(record.in_flight)} after {world.limits.drain_s:.0f} s"
        turn.decide("stop", record.id, f"{reason}; {cut_after}")
    if record.state is State.READY:
        if record.crashes and turn.now >= record.ready_at + world.limits.backoff_reset_s:
            record.crashes.clear()
        _keep_alive(world, turn, record)
    world.want(record)


def _give_up(world: World, turn: Turn, record: Record) -> None:
    """A load that an operator asked for waits no longer than a request; while it lasts its victims are drained."""
    patience = world.limits.queue_wait_s
    if record.asked_at is None or record.state is State.STARTING or turn.now < record.asked_at + patience:
        return
    record.asked_at = None
    reason = f"it was asked for and got no place within {patience:.0f} s"
    if record.state is State.STOPPED:
        record.life.reason = reason
    turn.decide("give_up", record.id, reason)


def _keep_alive(world: World, turn: Turn, record: Record) -> None:
    if record.keep_alive_at is None or turn.now < record.keep_alive_at:
        return
    record.keep_alive_at = None
    keep_alive_s = record.spec.keep_alive_s
    if keep_alive_s is None or record.pinned or record.in_flight:
        return  # the end of its last request sets it again
    if world.queue.count(record.id) > 0:
        record.last_used = turn.now
    if turn.now < record.last_used + keep_alive_s:
        world.keep_alive(record)
        return
    reason = f"idle for {keep_alive_s:.0f} s (keep_alive_s)"
    world.stop(turn, record, StopCause.IDLE, reason)
    turn.decide("stop", record.id, reason)
