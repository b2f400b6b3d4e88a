"""Counters and histograms like prometheus_client's, but without locks, which makes counting ten times cheaper.

Use them from the event loop's thread only: requests end and metrics are read there. Their lines are made one by one, as
prometheus_client makes them: a turn of the loop may come between two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Told = Callable[[Labels], Labels | None]
"""The labels of a series of which these are a part; None: of none."""
Sample = tuple[Labels, float]
_SUMMED = 256  # series, in a tenth of a millisecond


@lru_cache(4096)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@lru_cache(4096)
def _number(value: float) -> str:
    told: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return told


def family(name: str, kind: str, about: str, labels: Sequence[str], samples: Iterable[Sample]) -> Iterator[str]:
    """The lines of a metric of which each sample has these labels, in Prometheus's text format."""
    suffix = "_total" if kind == "counter" else ""
    yield f"# HELP {name}{suffix} {about}\n# TYPE {name}{suffix} {kind}\n"
    order = sorted(range(len(labels)), key=labels.__getitem__)
    for values, value in samples:
        told = ",".join([f'{labels[at]}="{_escaped(values[at])}"' for at in order])
        yield f"{name}{suffix}{{{told}}} {_number(value)}\n"


class FastCounter:
    """Amounts by labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str], told: Told | None = None) -> None:
        """`told` gives the values of `labels` for those that are counted, where these are others."""
        self._families = [(name, about, labels, told)]
        self._amounts: dict[Labels, int] = {}

    def also(self, name: str, about: str, labels: Sequence[str], told: Told) -> None:
        """Tell the same under this name, by other labels."""
        self._families.append((name, about, labels, told))

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Count so much for these labels' values."""
        self._amounts[labels] = self._amounts.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        """As Prometheus reads it: what was counted when the first line was made."""
        counted = tuple(self._amounts.items())
        for name, about, names, told in self._families:
            samples = counted if told is None else (yield from _sums(counted, told))
            yield from family(name, "counter", about, names, samples)


def _sums(counted: Iterable[tuple[Labels, int]], told: Told) -> Generator[str, None, Iterable[Sample]]:
    """Empty lines meanwhile: the turns of the loop that may come between them."""
    amounts: Counter[Labels] = Counter()
    for at, (each, amount) in enumerate(counted):
        if (labels := told(each)) is not None:
            amounts[labels] += amount
        if not at % _SUMMED:
            yield ""
    return amounts.items()


class FastHistogram:
    """The distribution of values, by model. `bounds` are the buckets' upper ends, ascending."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._names = [(name, about)]
        self._bounds = bounds
        self._ends = (*map(_number, bounds), "+Inf")
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

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

    def lines(self) -> Iterator[str]:
        """As Prometheus reads it. Each model's counts are of one moment, the next one's may be of a later one."""
        for name, about in self._names:
            yield f"# HELP {name} {about}\n# TYPE {name} histogram\n"
            for model, counts in tuple(self._counts.items()):
                label = f'model="{_escaped(model)}"'
                sums = [*map(_number, accumulate(counts))]
                buckets = [
                    f'{name}_bucket{{le="{end}",{label}}} {count}\n'
                    for end, count in zip(self._ends, sums, strict=True)
                ]
                total = _number(self._sums[model])
                yield f"{''.join(buckets)}{name}_count{{{label}}} {sums[-1]}\n{name}_sum{{{label}}} {total}\n"
