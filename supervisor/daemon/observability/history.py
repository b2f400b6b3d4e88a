"""The last half hour as numbers: one point every two seconds, in a ring that never grows.

A point is written when memory was read, at most one per interval. Readings drift, so a single interval without a reading
copies the next one. Several of them (the machine slept) become empty points, so that a point's place in the list is its
time. Counted values (swaps, tokens) belong to the interval in which they happened; a response's tokens are spread evenly
over its duration.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from supervisor.gateway.request import Request

INTERVAL_S: Final = 2.0
POINTS: Final = 900
COUNTED: Final = ("tokens_per_s", "swaps")

Point = dict[str, float | None]


class History:
    """The ring of points. All times are on the engine's clock."""

    def __init__(self, *, interval_s: float = INTERVAL_S, points: int = POINTS) -> None:
        self.interval_s = interval_s
        self._points: deque[Point] = deque(maxlen=points)
        self._last_number = 0  # number of the newest point; a point's number is its time in intervals

    def sample(self, now: float, values: Mapping[str, float | None]) -> None:
        """Write the values at `now`; only the first ones of an interval count."""
        number = self._ensure_point(now)
        point = self._point(number)
        late = (
            len(self._points) > 2 and not self._points[-2].keys() - COUNTED
        )  # this reading came just after its interval
        for name, value in values.items():
            point.setdefault(name, value)
            if late and name in self._points[-3]:
                self._points[-2].setdefault(name, value)

    def count(self, name: str, now: float, amount: float = 1) -> None:
        """Add to a count of this interval."""
        self._add(self._ensure_point(now), name, amount)

    def spread(self, name: str, amount: float, began: float, ended: float) -> None:
        """Add `amount` as a rate per second, spread evenly from `began` (at least an interval before `ended`) to `ended`.

        A part older than the ring is dropped.
        """
        began = min(began, ended - self.interval_s)
        rate = amount / (ended - began)
        newest = self._ensure_point(ended)
        oldest = max(math.floor(began / self.interval_s), self._last_number - len(self._points) + 1)
        for number in range(oldest, newest + 1):
            start = number * self.interval_s
            covered_s = min(ended, start + self.interval_s) - max(began, start)
            self._add(number, name, rate * covered_s / self.interval_s)

    def count_tokens(self, ended: Sequence[Request]) -> None:
        """Add the tokens of requests that have ended."""
        quick = 0  # of responses no longer than a point: added in one step
        for request in ended:
            if request.usage.completion is not None and request.attempt.ticket is not None:
                if request.ended_at - request.attempt.ticket.admitted < self.interval_s:
                    quick += request.usage.completion
                else:
                    self.spread(
                        "tokens_per_s", request.usage.completion, request.attempt.ticket.admitted, request.ended_at
                    )
        if quick:
            now = ended[-1].ended_at
            self.spread("tokens_per_s", quick, now, now)

    def series(self) -> tuple[float, dict[str, list[float | None]]]:
        """The first point's time, and the values of every name, oldest first; None: no sample."""
        names = dict.fromkeys(COUNTED) | dict.fromkeys(name for point in self._points for name in point)
        table = {
            name: [_rounded(point.get(name, 0.0 if name in COUNTED else None)) for point in self._points]
            for name in names
        }
        first = self._last_number - len(self._points) + 1
        return first * self.interval_s, table

    def _ensure_point(self, now: float) -> int:
        """Create the point for this time, and return its number."""
        number = math.floor(now / self.interval_s)
        if not self._points:
            self._points.append({})
            self._last_number = number
        for _ in range(min(number - self._last_number, self._points.maxlen or 0)):
            self._points.append({})
        self._last_number = max(self._last_number, number)
        return number

    def _point(self, number: int) -> Point:
        return self._points[number - self._last_number - 1]

    def _add(self, number: int, name: str, amount: float) -> None:
        point = self._point(number)
        point[name] = (point.get(name) or 0.0) + amount


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
