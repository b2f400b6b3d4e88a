"""The last half hour as numbers: one point every two seconds, in a ring that never grows.

A point is written when the memory has been read, at most one per interval. Readings drift, so one interval without any has
what the next one has; several (the machine slept) are there as empty points, so that a point's place in the list is its time. What is counted rather than sampled (swaps,
tokens) belongs to the interval in which it happened; an answer's tokens are spread evenly over the time it took.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from pydantic import JsonValue

INTERVAL_S: Final = 2.0
POINTS: Final = 900
COUNTED: Final = ("tokens_per_s", "swaps")

Point = dict[str, float | None]


class History:
    """Times are those of one monotonic clock, the engine's."""

    def __init__(self, *, interval_s: float = INTERVAL_S, points: int = POINTS) -> None:
        self.interval_s = interval_s
        self._points: deque[Point] = deque(maxlen=points)
        self._last = 0  # number of the newest point; a point's number is its time in intervals

    def sample(self, now: float, values: Mapping[str, float | None]) -> None:
        """The values at `now`; the first ones of an interval count."""
        number = self._reach(now)
        point = self._at(number)
        late = len(self._points) > 2 and not self._points[-2].keys() - COUNTED  # a reading that came just too late
        for name, value in values.items():
            point.setdefault(name, value)
            if late and name in self._points[-3]:
                self._points[-2].setdefault(name, value)

    def count(self, name: str, now: float, amount: float = 1) -> None:
        """Add to what happened in this interval."""
        self._add(self._reach(now), name, amount)

    def spread(self, name: str, amount: float, began: float, ended: float) -> None:
        """Add a rate: `amount` things evenly from `began` (an interval before `ended` at least) to `ended`, per second.

        What lies further back than the ring reaches is lost.
        """
        began = min(began, ended - self.interval_s)
        rate = amount / (ended - began)
        newest = self._reach(ended)
        oldest = max(math.floor(began / self.interval_s), newest - len(self._points) + 1)
        for number in range(oldest, newest + 1):
            start = number * self.interval_s
            covered_s = min(ended, start + self.interval_s) - max(began, start)
            self._add(number, name, rate * covered_s / self.interval_s)

    def series(self) -> tuple[float, dict[str, JsonValue]]:
        """When the first point begins, and for every name its values, oldest first; None where nothing was sampled."""
        names = dict.fromkeys(COUNTED) | dict.fromkeys(name for point in self._points for name in point)
        table: dict[str, JsonValue] = {
            name: [_rounded(point.get(name, 0.0 if name in COUNTED else None)) for point in self._points]
            for name in names
        }
        first = self._last - len(self._points) + 1
        return first * self.interval_s, table

    def _reach(self, now: float) -> int:
        """Make the point of this time; its number."""
        number = math.floor(now / self.interval_s)
        if not self._points:
            self._points.append({})
            self._last = number
        for _ in range(min(number - self._last, self._points.maxlen or 0)):
            self._points.append({})
        self._last = max(self._last, number)
        return number

    def _at(self, number: int) -> Point:
        return self._points[number - self._last - 1]

    def _add(self, number: int, name: str, amount: float) -> None:
        point = self._at(number)
        point[name] = (point.get(name) or 0.0) + amount


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
