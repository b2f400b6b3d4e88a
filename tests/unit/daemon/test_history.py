"""The history's ring."""

from __future__ import annotations

import pytest

from supervisor.daemon.observability.history import History


class TestHistory:
    """A ring of equal intervals; a point's place is its time."""

    def test_a_gap_is_empty_points(self):
        history = History()
        history.sample(100.0, {"queued": 1})
        history.sample(101.0, {"queued": 5})  # the same interval: the first counts
        history.sample(106.5, {"queued": 2})
        began, series = history.series()
        assert (began, series["queued"]) == (100.0, [1, None, None, 2])

    def test_one_late_reading_is_no_gap(self):
        history = History()
        history.sample(100.0, {"queued": 1})
        history.sample(101.99, {"queued": 7})
        history.count("swaps", 102.5)
        history.sample(104.01, {"queued": 3})
        assert history.series()[1] == {"queued": [1, 3, 3], "swaps": [0, 1, 0], "tokens_per_s": [0, 0, 0]}

    def test_is_bounded(self):
        history = History(points=10)
        for second in range(0, 100, 2):
            history.sample(second, {"queued": second})
        history.sample(10_000.0, {"queued": 7})
        began, series = history.series()
        assert (series["queued"], began) == ([None] * 9 + [7], 9982.0)

    def test_counts_within_the_interval(self):
        history = History()
        history.count("swaps", 10.0)
        history.count("swaps", 11.9)
        history.count("swaps", 12.0)
        assert history.series()[1]["swaps"] == [2, 1]

    @pytest.mark.parametrize(("began", "ended"), [(100.0, 110.0), (100.7, 107.3), (103.0, 103.1), (101.9, 102.1)])
    def test_spreads_all_of_it(self, began, ended):
        history = History()
        history.sample(90.0, {})
        history.spread("tokens_per_s", 500, began, ended)
        series = history.series()[1]["tokens_per_s"]
        assert sum(series) * history.interval_s == pytest.approx(500, rel=1e-3)
        assert max(series) <= 500 / max(ended - began, history.interval_s) + 0.001

    def test_what_lies_before_the_ring_is_lost(self):
        history = History(points=3)
        history.sample(100.0, {})
        history.spread("tokens_per_s", 100, 0.0, 100.0)
        assert all(value <= 1 for value in history.series()[1]["tokens_per_s"])
