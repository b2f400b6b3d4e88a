"""Wait reasons and forecasts: why a queued request waits, and for how long, by the state after an event.

Both are for people: `llmux why --request`, the admin API, load status in a stream. The texts complete "it waits for …" and
don't name the model itself, which clients may know by another name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supervisor.core.memory.device_ledger import Phase
from supervisor.core.messages import listed, seconds
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState
from supervisor.core.types import SERVES, ModelId, WorkerState


class WaitKind(StrEnum):
    """The reason for a part of a wait, in one word."""

    BODY = "body"  # the request's body was being received or checked
    PLACE = "place"  # the worker had its maximum of concurrent requests
    TURN = "turn"  # other models came first
    DRAIN = "drain"  # running requests had to end before a worker could stop
    UNLOAD = "unload"  # a worker ended
    MEMORY = "memory"  # memory was still being returned
    LOAD = "load"  # the model loaded
    CRASH = "crash"  # the pause after a crash
    HEALTH = "health"  # the worker did not answer its health checks
    RETRY = "retry"  # the worker ended before it took the request
    HANDOVER = "handover"  # another daemon took over


@dataclass(frozen=True, slots=True)
class WaitReason:
    """The reason why a request waits now."""

    kind: WaitKind
    what: str  # completes "it waits for …"
    others: tuple[ModelId, ...] = ()  # the other models in the reason


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long a request of a model will wait, by measured times only."""

    eta_s: float | None  # until it is loaded, by its last load; None: unknown
    text: str  # for people; may be empty


SHOWN: Final = 3
"""Maximum number of earlier models that a reason names."""

_UNTIMED: Final = "first load with these settings, no estimate yet"
# A constant, since it is needed at the end of each request while others wait for the worker.
_PLACE: Final = WaitReason(
    WaitKind.PLACE, "a free place: the model answers as many requests as it may at once, or as its context holds"
)
_OWN_MEMORY: Final = WaitReason(WaitKind.MEMORY, "the memory of its last worker to come back")


def wait_reason(state: SchedulerState, model: ModelState) -> WaitReason:
    """Why the model's queued requests wait now."""
    model = first_to_serve(state, model)
    match model.state:
        case WorkerState.STARTING:
            return WaitReason(WaitKind.LOAD, "the model to load")
        case WorkerState.READY if not model.answering:
            return WaitReason(WaitKind.HEALTH, "the model to answer its health checks again")
        case WorkerState.READY:
            return _PLACE
        case WorkerState.DRAINING:
            return _own_drain(model)
        case WorkerState.STOPPING if model.exited:
            return _OWN_MEMORY
        case WorkerState.STOPPING:
            return WaitReason(WaitKind.UNLOAD, "its last worker to end")
        case WorkerState.BACKOFF:
            return WaitReason(WaitKind.CRASH, "the next try after a crash")
        case _:
            return _not_loaded_reason(state, model)


def first_to_serve(state: SchedulerState, model: ModelState) -> ModelState:
    """The replica that serves the model's requests first: a ready one, else a loading one, else the one to load."""
    serving = [each for each in state.replicas(model) if each.serves]
    return min(serving, key=lambda each: each.state is WorkerState.STARTING, default=state.primary_replica(model))


def _own_drain(model: ModelState) -> WaitReason:
    if model.claimed_by is not None:
        return WaitReason(WaitKind.TURN, f"its next turn: it makes room for {model.claimed_by}", (model.claimed_by,))
    return WaitReason(WaitKind.DRAIN, "its last worker to end its requests")


def _not_loaded_reason(state: SchedulerState, model: ModelState) -> WaitReason:
    """Why a model without a worker isn't loaded: of several obstacles the longest one."""
    if model.id in state.wanted and state.wanted.place(model.id) is None and (before := _planned_before(state, model)):
        more = [f"{len(before) - SHOWN} more"] if len(before) > SHOWN else []
        return WaitReason(WaitKind.TURN, f"its turn, after {listed([*before[:SHOWN], *more])}", before)
    victims = [state.models[name] for name in state.claims(model.id) if name in state.models]
    if busy := _model_ids(victim for victim in victims if victim.state in SERVES and victim.in_flight):
        return WaitReason(WaitKind.DRAIN, f"{listed(busy)} to end {_possessive(busy)} requests", busy)
    idle = [victim for victim in victims if victim.state is WorkerState.READY]
    yields_at = {each.id: state.admission.yields_at(each, model, state.queue) for each in idle}
    keeping = [each for each in idle if yields_at[each.id] > state.admission.matures_at(each)]
    if protected := _model_ids(each for each in keeping if yields_at[each.id] <= state.admission.protected_until(each)):
        return WaitReason(
            WaitKind.TURN, f"{listed(protected)}, held for {_possessive(protected)} next request", protected
        )
    if used := _model_ids(keeping):
        return WaitReason(WaitKind.TURN, f"{listed(used)}, last used by more urgent requests", used)
    if kept := _model_ids(idle):
        return WaitReason(WaitKind.TURN, f"{listed(kept)}, just loaded, to have had {_possessive(kept)} turn", kept)
    loading = [each for each in victims if each.state is WorkerState.STARTING]
    if first := _model_ids(loading or (each for each in state.models.values() if _loads_here(each) and not victims)):
        return WaitReason(WaitKind.TURN, f"{listed(first)} to load first", first)
    if going := _model_ids(victim for victim in victims if victim.state is WorkerState.STOPPING and not victim.exited):
        return WaitReason(WaitKind.UNLOAD, f"{listed(going)} to be unloaded", going)
    returning = (lease.holder[0] for lease in state.ledger.leases() if lease.phase is Phase.RETURNING)
    if owing := tuple(dict.fromkeys(returning)):
        if model.id in owing:
            return _OWN_MEMORY
        return WaitReason(WaitKind.MEMORY, f"the memory of {listed(owing)} to come back", owing)
    if state.ledger.unshared is not None:
        return WaitReason(WaitKind.MEMORY, f"others who share the memory: {state.ledger.unshared}")
    if state.handing_over:
        return WaitReason(WaitKind.HANDOVER, "another daemon to take over")
    return WaitReason(WaitKind.MEMORY, "memory to be free")


def _planned_before(state: SchedulerState, model: ModelState) -> tuple[ModelId, ...]:
    """The models that are planned before this one."""
    return tuple(itertools.takewhile(lambda model_id: model_id != model.id, state.wanted))


def _loads_here(model: ModelState) -> bool:
    return model.state is WorkerState.STARTING and not model.spec.remote


def _possessive(names: tuple[ModelId, ...]) -> str:
    return "its" if len(names) == 1 else "their"


def _model_ids(models: Iterable[ModelState]) -> tuple[ModelId, ...]:
    return tuple(model.id for model in models)


def forecast(state: SchedulerState, model: ModelState, now: float) -> Forecast:
    """How long until the model is loaded."""
    model = first_to_serve(state, model)
    load_s = model.load_s
    if model.state is WorkerState.STARTING:
        loading_s = now - model.life.since
        if load_s is None:
            return Forecast(None, _UNTIMED)
        if loading_s < load_s:
            return Forecast(load_s - loading_s, f"about {_whole_seconds(load_s - loading_s)}")
        return Forecast(None, f"longer than its last load, which took {_whole_seconds(load_s)}")
    if model.state is WorkerState.READY:
        return Forecast(None, "")
    then = f"its {_UNTIMED}" if load_s is None else f"about {_whole_seconds(load_s)}"
    return Forecast(None, f"{_longest_wait_text(state, model, now)}then {then}")


def _longest_wait_text(state: SchedulerState, model: ModelState, now: float) -> str:
    """The maximum time until the load may begin, as the beginning of a sentence; empty if unknown."""
    if model.crashes.retry_at is not None:
        return f"in {_whole_seconds(model.crashes.retry_at - now)}, "
    drains = [
        found.drain
        for name in state.claims(model.id)
        if (found := state.models.get(name)) is not None and found.in_flight
    ]
    until = max((math.inf if drain is None else drain.until for drain in drains), default=math.inf)
    return "" if math.isinf(until) else f"at most {_whole_seconds(until - now)}, "


def _whole_seconds(count_s: float) -> str:
    """The time in whole seconds, at least one."""
    return seconds(max(1.0, math.ceil(count_s)))
