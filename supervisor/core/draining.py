"""How long a worker's running requests hold up what it has to go for.

A worker that drains for another model has until a deadline, which the admission policy sets: a short one while somebody
of higher priority waits, a long one otherwise. Clients that have stopped reading shorten it, too: they would hold two
models up for as long as they like. What still runs then is cut.
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
from supervisor.core.termination import cut, stop_now
from supervisor.core.types import StopCause, WorkerState


def drain_for(state: SchedulerState, step: Step, victim: ModelState, priority: int) -> None:
    """Drain a busy victim, or change its deadline: models of `priority` at most wait for it."""
    urgent = state.admission.may_overtake(priority, victim.spec.priority)
    if victim.state is WorkerState.READY:
        _begin(state, step, victim, step.now if urgent else None)
    elif victim.drain is not None and not victim.drain.is_ordered:
        _reckon(state, step, victim, victim.drain, urgent=urgent)


def _begin(state: SchedulerState, step: Step, victim: ModelState, urgent_since: float | None) -> None:
    until = state.admission.drains_until(victim, step.now, urgent_since)
    look_at = state.admission.looks_again_at(victim, step.now)
    drain = Drain(StopCause.ROOM, f"drains for {victim.claimed_by}", step.now, until, urgent_since, look_at)
    advance(victim, Trigger.DRAIN, step.now, drain.reason, drain=drain)
    _announce(state, step, victim, drain)
    if look_at is not None:
        state.wake(look_at, victim.id)
        step.emit(AskClients(victim.id, victim.generation))


def _reckon(state: SchedulerState, step: Step, victim: ModelState, drain: Drain, *, urgent: bool) -> None:
    """Who waits for it has changed, perhaps, or the configuration."""
    urgent_since = drain.urgent_since
    if urgent != (urgent_since is not None):
        urgent_since = step.now if urgent else None
    until = state.admission.drains_until(victim, drain.since, urgent_since)
    look_at = drain.look_at if state.admission.drain_s(victim.spec) is None else None
    victim.drain = replace(drain, urgent_since=urgent_since, until=until, look_at=look_at)
    if until != drain.until:
        _announce(state, step, victim, victim.drain)


def _announce(state: SchedulerState, step: Step, victim: ModelState, drain: Drain) -> None:
    state.wake(drain.until, victim.id)
    end = "never cut" if math.isinf(drain.until) else f"cut in {drain.until - step.now:.0f} s"
    if drain.look_at is not None:  # else it is as configured
        urgent = drain.urgent_since is not None
        end += ", as a model of higher priority waits" if urgent else ", or once the clients have stopped reading"
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
    stop_now(state, step, model, drain.cause, drain.reason)
    kind = "stop" if drain.is_ordered else "evicted"
    step.decide(kind, model.id, f"{drain.reason}; {requests_counted(len(model.in_flight))} cut {why}")
