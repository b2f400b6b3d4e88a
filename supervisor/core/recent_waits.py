"""How long requests that were dispatched lately had waited, those that found a free worker included.

For people and clients: an error that says that the queue is full, and the admin API.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from supervisor.core.types import ModelId

MOST_WAITS: Final = 512
LATELY_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """How many wait, and how long others have waited lately, on average; None: none was dispatched lately."""

    depth: int
    mean_s: float | None


class RecentWaits:
    """The waits of the last requests, at most `MOST_WAITS`, dispatched within the last `LATELY_S`."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, ModelId, float]] = deque(maxlen=MOST_WAITS)

    def note(self, model: ModelId, waited_s: float, now: float) -> None:
        """A request was dispatched."""
        self._waits.append((now, model, waited_s))

    def mean_s(self, now: float, model: ModelId | None = None) -> float | None:
        """Of one model's, or of all; None: none was dispatched lately."""
        waits = self._lately(now, model)
        return sum(waits) / len(waits) if waits else None

    def p95_s(self, now: float, model: ModelId | None = None) -> float | None:
        """What all but a twentieth of them stayed within; None: as above."""
        waits = sorted(self._lately(now, model))
        return waits[math.ceil(0.95 * len(waits)) - 1] if waits else None

    def _lately(self, now: float, model: ModelId | None) -> list[float]:
        since = now - LATELY_S
        return [waited for at, name, waited in self._waits if at >= since and model in {None, name}]
