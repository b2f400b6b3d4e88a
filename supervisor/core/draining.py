"""How long a worker's running requests hold up what it has to go for.

A worker that drains for another model ends its answers first, whoever waits: an answer that goes on is never cut, and the
data path ends one on which nothing comes any more. Two things cut: a `drain_s` that the configuration sets, and clients that
have all stopped reading, who would hold two models up for as long as they like.
"""

from __future__ import annotations

import math
from dataclasses import replace

from supervisor.core.effects import AskClients
from supervisor.core.events import ClientsRead
from supervisor.core.lifecycle import Trigger, advance
from supervisor.core.messages import requests_counted
from supervisor.core.model_state import Drain, ModelState
from supervisor.core.state import SchedulerState, Step
from supervisor.core.termination import cut, drained, stop_now
from supervisor.core.types import StopCause, WorkerState


def drain_for(state: SchedulerState, step: Step, victim: ModelState) -> None:
    """Drain a busy victim. One that drains already follows the configuration."""
    before = victim.drain
    if victim.state is not WorkerState.READY and (before is None or before.is_ordered):
        return
    since = step.now if before is None else before.since
    until = state.admission.drains_until(victim, since)
    if before is not None and before.until == until:
        return
    look_at = state.admission.looks_again_at(victim, step.now)
    drain = Drain(StopCause.ROOM, f"drains for {victim.claimed_by}", since, until, look_at)
    if before is None:
        advance(victim, Trigger.DRAIN, step.now, drain.reason, drain=drain)
    else:
        victim.drain = drain
    _announce(state, step, victim, drain)
    if look_at is not None:
        state.wake(look_at, victim.id)
        step.emit(AskClients(victim.id, victim.generation))


def _announce(state: SchedulerState, step: Step, victim: ModelState, drain: Drain) -> None:
    state.wake(drain.until, victim.id)
    end = "never cut" if math.isinf(drain.until) else f"cut in {drain.until - step.now:.0f} s"
    if drain.look_at is not None:  # else it is as configured
        end += " while clients read"
    step.decide("drain", victim.id, f"{drain.reason}; {requests_counted(len(victim.in_flight))} in flight, {end}")


def look(state: SchedulerState, step: Step, model: ModelState) -> None:
    """End its drain if that is due, or have its clients looked at."""
    drain = model.drain
    if drain is None:
        return
    if step.now >= drain.until:
        _cut(state, step, model, drain, f"after {step.now - drain.since:.0f} s")
    elif drain.look_at is not None and step.now >= drain.look_at:
        look_at = state.admission.looks_again_at(model, step.now)
        model.drain = replace(drain, look_at=look_at)
        if look_at is not None:
            state.wake(look_at, model.id)
            step.emit(AskClients(model.id, model.generation))


def clients_read(state: SchedulerState, step: Step, event: ClientsRead) -> None:
    """Nobody waits for answers that nobody reads: when all its clients have stopped, its requests are cut."""
    model = state.current(event.model, event.generation)
    drain = None if model is None else model.drain
    if model is None or drain is None or drain.look_at is None:
        return
    model.drain = replace(drain, read=event.read)
    stopped = (
        ticket in drain.read
        and ticket in event.read
        and state.admission.has_stopped_reading(event.read[ticket] - drain.read[ticket])
        for ticket in model.in_flight
    )
    if all(stopped):
        _cut(state, step, model, drain, "as the clients have stopped reading")


def _cut(state: SchedulerState, step: Step, model: ModelState, drain: Drain, why: str) -> None:
    needed = not drain.is_ordered and model.claimed_by is not None
    cut(step, model, f"its memory is needed for {model.claimed_by}" if needed else drain.reason)
    stop_now(state, step, model, drain.cause, drained(model, drain))
    kind = "stop" if drain.is_ordered else "evicted"
    step.decide(kind, model.id, f"{drain.reason}; {requests_counted(len(model.in_flight))} cut {why}")
