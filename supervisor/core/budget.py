"""Whether an answer can come within its request's budget.

Expected is what was learned and nothing else: the rest of the model's load, the turns of the requests before this one,
and the answer itself, by the 99th percentile of such answers. What was never measured counts nothing, so that a request
is refused only for a reason, and a first one never. Not foreseen: the turns of other models, requests of a higher class
that are still to come, crashes. A request that they hold up until its budget is over learns it then (`requests.expire`).
"""

from __future__ import annotations

from supervisor.core.demand import Demand, Expected
from supervisor.core.messages import listed
from supervisor.core.model_state import ModelState
from supervisor.core.state import SchedulerState
from supervisor.core.types import WorkerState


def told(needed: Expected) -> str:
    """For people, part by part."""
    parts = {"to load": needed.load_s, "in the queue": needed.queue_s, "for the answer": needed.answer_s}
    return listed([f"{exactly(part_s)} {what}" for what, part_s in parts.items() if part_s > 0])


def exactly(time_s: float) -> str:
    """A time that is compared with another."""
    return f"{time_s:.1f} s" if time_s >= 1 else f"{time_s:.2g} s"


def expected(state: SchedulerState, model: ModelState, demand: Demand, now: float) -> Expected:
    """What is known of how long a request that arrives now will take."""
    answers = demand.answers
    if answers is None:
        return Expected(_load_s(state, model, now))
    ready = [each for each in state.replicas(model) if each.state is WorkerState.READY]
    places = model.spec.target_inflight * max(1, len(ready))
    ahead = state.queue.ahead(model.id, demand) + sum(len(each.in_flight) for each in ready or [model])
    queue_s = ahead // places * answers.mean_s if places > 0 else 0.0
    return Expected(_load_s(state, model, now), queue_s, answers.p99_s)


def _load_s(state: SchedulerState, model: ModelState, now: float) -> float:
    """The rest of its load by the time that the last one took: of the replica that is ready first."""
    if model.line in state.groups:
        coming = [each for each in state.replicas(model) if each.serves or each.state is WorkerState.DRAINING]
        return min((_rest_s(each, now) for each in coming), default=_rest_s(state.leader(model), now))
    return _rest_s(model, now)


def _rest_s(model: ModelState, now: float) -> float:
    match model.state:
        case WorkerState.READY | WorkerState.DRAINING:  # a draining worker may stay after all
            return 0.0
        case WorkerState.STARTING:
            return max(0.0, (model.load_s or 0.0) - (now - model.life.since))
        case _:
            return model.load_s or 0.0
