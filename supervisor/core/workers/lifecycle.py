"""A worker's lifecycle: one table with the next state for each state and trigger, and the fields to set and clear.

An impossible transition raises, changes nothing, and prints the worker's history: a wrong state is a bug in the
scheduler, and the history shows its origin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from supervisor.core.demand import NORMAL
from supervisor.core.model_state import CrashHistory, Drain, ModelState, Worker
from supervisor.core.types import Devices, Generation, WorkerState


class Trigger(StrEnum):
    """The triggers of a worker's transitions."""

    START = "start"  # its memory is free: spawn the worker
    READY = "ready"  # it answers
    DRAIN = "drain"  # no new requests; stop when the running ones end
    RESUME = "resume"  # the reason for the drain has ended
    STOP = "stop"  # the engine terminates the worker
    RELEASED = "gone"  # its process tree has ended and its memory is back
    CRASH = "crash"  # the worker ended by itself; retry later
    FAIL = "fail"  # it crashed too often, can never work, or llmux has a bug in handling it
    RETRY = "retry"  # the pause after a crash is over
    RESET = "reset"  # an operator orders a retry


@dataclass(frozen=True, slots=True)
class Entry:
    """The arguments of a transition; the comments name the triggers that need them."""

    now: float
    devices: Devices = ()  # START
    drain: Drain | None = None  # DRAIN
    retry_at: float | None = None  # CRASH, FAIL


def _on_start(model: ModelState, entry: Entry) -> None:
    model.generation = Generation(model.generation + 1)
    model.worker = Worker(entry.devices)
    model.unloaded_by_operator = False
    model.crashes = replace(model.crashes, last=None)


def _on_ready(model: ModelState, entry: Entry) -> None:
    model.ready_at = model.last_used = entry.now
    model.last_priority = NORMAL
    model.load_intent = None


def _on_drain(model: ModelState, entry: Entry) -> None:
    model.drain = entry.drain
    model.keep_alive_at = None


def _on_resume(model: ModelState, _entry: Entry) -> None:
    model.drain = None


def _on_stop(model: ModelState, entry: Entry) -> None:
    model.set_worker(answering=False)
    model.drain = model.keep_alive_at = None
    model.stopped_at = entry.now


def _on_end(model: ModelState, entry: Entry) -> None:
    """The worker has ended, also by a crash. `retry_at` is set iff the model is retried automatically."""
    model.worker = model.drain = model.keep_alive_at = model.mistake = None
    model.crashes = replace(model.crashes, retry_at=entry.retry_at)


def _on_retry(model: ModelState, _entry: Entry) -> None:
    model.crashes = replace(model.crashes, retry_at=None)


def _on_reset(model: ModelState, _entry: Entry) -> None:
    model.crashes = CrashHistory(oom_retried=model.crashes.oom_retried)


class Transition(NamedTuple):
    """The state after a trigger, and the function that sets and clears the model's fields."""

    to: WorkerState
    enter: Callable[[ModelState, Entry], None]


_S = WorkerState

TABLE: dict[tuple[WorkerState, Trigger], Transition] = {
    (_S.STOPPED, Trigger.START): Transition(_S.STARTING, _on_start),
    (_S.STOPPED, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.STARTING, Trigger.READY): Transition(_S.READY, _on_ready),
    (_S.STARTING, Trigger.STOP): Transition(_S.STOPPING, _on_stop),
    (_S.STARTING, Trigger.RELEASED): Transition(_S.STOPPED, _on_end),  # ended by itself in a way that needs no backoff
    (_S.STARTING, Trigger.CRASH): Transition(_S.BACKOFF, _on_end),
    (_S.STARTING, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.READY, Trigger.DRAIN): Transition(_S.DRAINING, _on_drain),
    (_S.READY, Trigger.STOP): Transition(_S.STOPPING, _on_stop),
    (_S.READY, Trigger.CRASH): Transition(_S.BACKOFF, _on_end),
    (_S.READY, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.DRAINING, Trigger.RESUME): Transition(_S.READY, _on_resume),
    (_S.DRAINING, Trigger.STOP): Transition(_S.STOPPING, _on_stop),
    (_S.DRAINING, Trigger.CRASH): Transition(_S.BACKOFF, _on_end),
    (_S.DRAINING, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.STOPPING, Trigger.RELEASED): Transition(_S.STOPPED, _on_end),
    (_S.STOPPING, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.BACKOFF, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.BACKOFF, Trigger.RETRY): Transition(_S.STOPPED, _on_retry),
    (_S.BACKOFF, Trigger.RESET): Transition(_S.STOPPED, _on_reset),
    (_S.FAILED, Trigger.FAIL): Transition(_S.FAILED, _on_end),
    (_S.FAILED, Trigger.RETRY): Transition(_S.STOPPED, _on_retry),
    (_S.FAILED, Trigger.RESET): Transition(_S.STOPPED, _on_reset),
}


class ImpossibleTransitionError(AssertionError):
    """The table has no such transition. A bug; the message contains the worker's history."""


def advance(
    model: ModelState,
    trigger: Trigger,
    now: float,
    reason: str,
    *,
    devices: Devices = (),
    drain: Drain | None = None,
    retry_at: float | None = None,
) -> None:
    """Make the transition at `now`, or raise ImpossibleTransitionError and change nothing."""
    transition = TABLE.get((model.state, trigger))
    if transition is None:
        message = f"{model.id}: {trigger} in {model.state} ({reason}); story:\n{model.life.history_text()}"
        raise ImpossibleTransitionError(message)
    transition.enter(model, Entry(now, devices, drain, retry_at))
    model.life.enter(transition.to, trigger, now, reason)
