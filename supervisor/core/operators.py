"""What people ask for: load, unload, pin, other settings, another configuration, the end.

What is asked for ends in a loaded model or in a reason why not: a load that got no place for as long as a request may
wait is given up. A changed definition needs another worker: the running one ends after its requests, then the model
comes back with its new specification, if it was in use.
"""

from __future__ import annotations

from supervisor.core.lifecycle import Lifecycle, Step
from supervisor.core.state import Record, Turn, World
from supervisor.core.termination import forget, take_down
from supervisor.core.types import (
    Configured,
    LoadAsked,
    ModelSpec,
    PinAsked,
    RejectCode,
    Respecified,
    State,
    StopCause,
    UnloadAsked,
)


def load(world: World, turn: Turn, event: LoadAsked) -> None:
    """Want it whatever the traffic; what failed before is forgotten."""
    record = world.records.get(event.model)
    if record is None or record.retired or world.shutting_down:
        return
    _reset(turn, record, "reset by an operator")
    if record.state is State.DRAINING and record.stop_reason is not None and record.next_spec is None:
        record.stop_reason = record.drain_until = None
        world.resume(turn, record, "an operator asked for it again")
    elif record.state is not State.READY:
        _ask(world, turn, record)
    world.want(record)


def _ask(world: World, turn: Turn, record: Record) -> None:
    record.asked_at = turn.now if record.asked_at is None else record.asked_at
    world.wake(record.asked_at + world.limits.queue_wait_s, record.id)


def _reset(turn: Turn, record: Record, reason: str) -> None:
    if record.life.can(Step.RESET):
        record.life.step(Step.RESET, turn.now, reason)
        record.crashes.clear()
        record.crash = None


def unload(world: World, turn: Turn, event: UnloadAsked) -> None:
    """Nobody but a new request brings it back."""
    record = world.records.get(event.model)
    if record is None:
        return
    record.asked_at = None
    record.restore = False
    reason = "unloaded by an operator"
    if event.force or record.state not in {State.READY, State.DRAINING}:
        message = f"{record.id} was {reason}."
        world.reject_all(turn, record, RejectCode.MODEL_UNLOADED, message, retry_after_s=5.0)
    take_down(world, turn, record, StopCause.OPERATOR, reason, force=event.force)
    _reset(turn, record, reason)
    world.want(record)


def pin(world: World, turn: Turn, event: PinAsked) -> None:
    """It keeps its memory whoever asks, or is like all others again."""
    record = world.records.get(event.model)
    if record is None:
        return
    record.pin = event.pin
    turn.decide("pin" if event.pin else "unpin", record.id, "asked by an operator")
    world.keep_alive(record)


def respecify(world: World, turn: Turn, event: Respecified) -> None:
    """The model runs with other settings from now on."""
    record = world.records.get(event.spec.id)
    if record is not None and not record.retired:
        _specify(world, turn, event.spec, "an operator loads it with other settings")


def configure(world: World, turn: Turn, event: Configured) -> None:
    """The whole configuration, at boot or after a reload."""
    world.limits, world.policy = event.limits, event.policy
    world.ledger.configure(event.devices, event.limits)
    world.queue.configure(event.limits)
    named = {spec.id for spec in event.models}
    for spec in event.models:
        _specify(world, turn, spec, "its configuration changed")
    for record in list(world.records.values()):
        if record.id not in named:
            _retire(world, turn, record)


def _specify(world: World, turn: Turn, spec: ModelSpec, why: str) -> None:
    record = world.records.get(spec.id)
    if record is None:
        record = Record(spec, Lifecycle(spec.id, turn.now), generation=world.last_forgotten, last_used=turn.now)
        world.records[spec.id] = record
        record.restore = spec.preload or spec.remote
    elif record.has_worker and not _still_right(record, spec):
        record.next_spec = spec
        is_going = record.state is State.STOPPING or record.stop_reason is not None
        record.restore = record.restore or not is_going
        take_down(world, turn, record, StopCause.CONFIGURATION, why)
    else:
        if record.spec.definition != spec.definition:
            _reset(turn, record, why)
            record.restore = record.restore or spec.remote
        record.restore = record.restore or (spec.preload and not record.spec.preload and not record.has_worker)
        record.spec = spec
        record.next_spec = None
        world.dispatch(turn, record)
        world.keep_alive(record)
    record.retired = False
    world.want(record)


def _still_right(record: Record, spec: ModelSpec) -> bool:
    """May its worker go on as it is?"""
    return record.spec.definition == spec.definition and (not spec.devices or set(record.devices) <= set(spec.devices))


def _retire(world: World, turn: Turn, record: Record) -> None:
    record.retired = True
    message = f"{record.id} was removed from the configuration."
    world.reject_all(turn, record, RejectCode.MODEL_NOT_FOUND, message)
    if record.has_worker:
        take_down(world, turn, record, StopCause.CONFIGURATION, "removed from the configuration")
    else:
        forget(world, turn, record)


def shut_down(world: World, turn: Turn) -> None:
    """Take nothing new, drain, stop everything."""
    world.shutting_down = True
    for record in list(world.records.values()):
        message = "llmux is shutting down; try again in a moment."
        world.reject_all(turn, record, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0)
        world.want(record)
        take_down(world, turn, record, StopCause.SHUTDOWN, "llmux is shutting down")
