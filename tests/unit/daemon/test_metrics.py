"""Our counters' lines are those that prometheus_client would make, byte for byte."""

from __future__ import annotations

from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from supervisor.daemon.observability.metric_table import Described
from supervisor.daemon.observability.metrics import FastCounter, FastHistogram

NAMES = ("x", 'q"\\\n', "ü")


class Collected:
    def __init__(self, family):
        self.collect = lambda: [family]


def test_a_counter():
    counter = FastCounter(Described("a_b", "counter", ("model", "class"), "What it is."))
    family = CounterMetricFamily("a_b", "What it is.", labels=["model", "class"])
    for at, name in enumerate(NAMES):
        for kind, amount in (("k", 10 ** (4 * at)), ("z", 0)):
            counter.add((name, kind), amount)
            family.add_metric([name, kind], amount)
    assert "".join(counter.lines()).encode() == generate_latest(Collected(family))


def test_the_same_by_other_labels():
    counter = FastCounter(Described("a", "counter", ("model", "status"), "A."))
    counter.also(Described("b", "counter", ("model",), "B."), lambda counted: (counted[0],) if counted[1] else None)
    counter.add(("m", "x"), 1)
    counter.add(("m", "y"), 2)
    counter.add(("m", ""), 4)
    assert "".join(counter.lines()).splitlines()[-1] == 'b_total{model="m"} 3.0'


def test_a_histogram():
    bounds = (0.5, 1, 10)
    histogram = FastHistogram(Described("h", "histogram", ("model",), "What it is."), bounds)
    family = HistogramMetricFamily("h", "What it is.", labels=["model"])
    ends = [*map(floatToGoString, bounds), "+Inf"]
    for name in NAMES:
        histogram.observe(name, 0.1, 0.7, 3, 99)
        family.add_metric([name], list(zip(ends, accumulate([1, 1, 1, 1]), strict=True)), 0.1 + 0.7 + 3 + 99)
    histogram.expect("none")
    family.add_metric(["none"], [(end, 0) for end in ends], 0.0)
    assert "".join(histogram.lines()).encode() == generate_latest(Collected(family))


def test_what_is_counted_meanwhile():
    """A turn of the loop may come between two lines."""
    counter = FastCounter(Described("c", "counter", ("model",), "C."))
    histogram = FastHistogram(Described("h", "histogram", ("model",), "H."), (1,))
    for name in NAMES:
        counter.add((name,))
        histogram.observe(name, 1)
    for of, add in ((counter, lambda: counter.add(("new",))), (histogram, lambda: histogram.observe("new", 1))):
        lines = of.lines()
        began = [next(lines), next(lines)]
        add()
        assert "new" not in "".join([*began, *lines])
