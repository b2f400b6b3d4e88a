"""How long complete answers of each model took lately, for the budgets of requests. Memory is bounded; a restart forgets.

An answer's time counts from the moment when a worker took its request. An answer that failed, or whose client left, doesn't
count. Old times are forgotten: a model that was slow once would stay slow for ever if its requests were refused for that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from supervisor.core.demand import AnswerTimes
from supervisor.core.types import ModelId, base_of
from supervisor.gateway.request import Request

KEPT: Final = 256
"""Answers that are remembered of one model on one path. Of fewer than a hundred the 99th percentile is the longest."""
FORGOTTEN_S: Final = 3600.0


class AnswerLog:
    """The times of all models' answers. Use from the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken: dict[tuple[ModelId, str], deque[tuple[float, float]]] = {}  # when each ended, and its duration

    def observe(self, request: Request) -> None:
        """Add the answer of a request that ended. See `InFlight.observers`."""
        ticket, outcome = request.attempt.ticket, request.attempt.outcome
        if ticket is None or outcome.status != 200 or outcome.error or request.failure:
            return
        at = base_of(ticket.model), request.path
        kept = self._taken.get(at)
        if kept is None:
            kept = self._taken[at] = deque(maxlen=KEPT)
        kept.append((request.ended_at, request.ended_at - ticket.admitted))

    def of(self, model: ModelId, path: str) -> AnswerTimes | None:
        """The times of the model's answers on this path; None where none is remembered."""
        kept, since = self._taken.get((model, path), ()), self._clock() - FORGOTTEN_S
        taken = sorted(took_s for ended_at, took_s in kept if ended_at >= since)
        if not taken:
            return None
        return AnswerTimes(sum(taken) / len(taken), taken[math.ceil(0.99 * len(taken)) - 1])
