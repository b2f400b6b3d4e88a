"""The durations of each model's recent complete answers, for the budgets of requests. Memory is bounded; a restart clears it.

An answer's time counts from its request's admission to a worker. An answer that failed, or whose client disconnected, doesn't
count. Old times expire: if requests were refused for them for ever, the model's speed would never be measured again.
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
"""Most answers kept for one model on one path. The 99th percentile of fewer than a hundred is the longest."""
FORGOTTEN_S: Final = 3600.0


class AnswerLog:
    """The times of all models' answers. Use from the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[tuple[ModelId, str], deque[tuple[float, float]]] = {}  # the end and duration of each, in s

    def observe(self, request: Request) -> None:
        """Add the answer of a request that ended. See `InFlight.observers`."""
        ticket, outcome = request.attempt.ticket, request.attempt.outcome
        if ticket is None or outcome.status != 200 or outcome.error or request.failure:
            return
        at = base_of(ticket.model), request.path
        kept = self._answers.get(at)
        if kept is None:
            kept = self._answers[at] = deque(maxlen=KEPT)
        kept.append((request.ended_at, request.ended_at - ticket.admitted))

    def of(self, model: ModelId, path: str) -> AnswerTimes | None:
        """The times of the model's answers on this path; None if no recent answer is known."""
        kept, since = self._answers.get((model, path), ()), self._clock() - FORGOTTEN_S
        durations = sorted(took_s for ended_at, took_s in kept if ended_at >= since)
        if not durations:
            return None
        return AnswerTimes(sum(durations) / len(durations), durations[math.ceil(0.99 * len(durations)) - 1])
