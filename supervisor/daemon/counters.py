"""Counters and histograms like prometheus_client's, but without locks, which makes counting ten times cheaper.

Use them from the event loop's thread only: requests end and metrics are read there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Told = Callable[[Labels], Labels | None]
"""The labels of a series of which these are a part; None: of none."""


class FastCounter(Collector):
    """Amounts by labels."""

    def __init__(
        self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry, told: Told | None = None
    ) -> None:
        """`told` gives the values of `labels` for those that are counted, where these are others."""
        self._families = [(name, about, labels, told)]
        self._amounts: dict[Labels, int] = {}
        registry.register(self)

    def also(self, name: str, about: str, labels: Sequence[str], told: Told) -> None:
        """Tell the same under this name, by other labels."""
        self._families.append((name, about, labels, told))

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Count so much for these labels' values."""
        self._amounts[labels] = self._amounts.get(labels, 0) + amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        for name, about, names, told in self._families:
            family = CounterMetricFamily(name, about, labels=names)
            amounts: Counter[Labels] = Counter()
            for counted, amount in self._amounts.items():
                labels = counted if told is None else told(counted)
                if labels is not None:
                    amounts[labels] += amount
            for labels, amount in amounts.items():
                family.add_metric(labels, amount)
            yield family


class FastHistogram(Collector):
    """The distribution of values, by model. `bounds` are the buckets' upper ends, ascending."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._names = [(name, about)]
        self._bounds = bounds
        self._ends = (*map(floatToGoString, bounds), "+Inf")
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        registry.register(self)

    def also(self, name: str, about: str) -> None:
        """Tell the same under this name."""
        self._names.append((name, about))

    def expect(self, model: str) -> list[int]:
        """Tell of this model from now on, also before its first value. Its counts by bucket."""
        self._sums.setdefault(model, 0.0)
        return self._counts.setdefault(model, [0] * len(self._ends))

    def observe(self, model: str, *values: float) -> None:
        """Count the values."""
        if not values:
            return
        counts = self._counts.get(model)
        if counts is None:
            counts = self.expect(model)
        bounds = self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sums[model] += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        for name, about in self._names:
            family = HistogramMetricFamily(name, about, labels=["model"])
            for model, counts in self._counts.items():
                buckets = list(zip(self._ends, accumulate(counts), strict=True))
                family.add_metric([model], buckets, self._sums[model])
            yield family
