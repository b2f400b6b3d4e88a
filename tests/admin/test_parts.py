"""The admin surfaces' parts by themselves: the hub, the history's ring, the log follower."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from supervisor.daemon.events import BACKLOG, SUBSCRIBERS, Hub
from supervisor.daemon.history import History
from supervisor.errors import UnavailableError
from supervisor.io.log_follow import MOST_BYTES, LogFollower


class TestHub:
    """Publishing never waits for anybody."""

    async def test_a_subscriber_gets_its_kinds_in_order(self):
        hub = Hub()
        with hub.subscribe(("alert",)) as subscription:
            for number in range(3):
                hub.publish("alert", {"number": number})
                hub.publish("reload", {})
            events = await subscription.next(1)
            assert [event.data["number"] for event in events] == [0, 1, 2]
            assert [event.seq for event in events] == [1, 3, 5]
            assert events[0].encoded() == b'event: alert\nid: 1\ndata: {"number":0}\n\n'
            assert await subscription.next(0.01) == []

    async def test_one_that_does_not_read_is_dropped_and_others_are_not(self):
        hub = Hub()
        slow, quick = hub.subscribe(("alert",)), hub.subscribe(("alert",))
        got = 0
        for _ in range(BACKLOG + 1):
            hub.publish("alert", {})
            got += len(await quick.next(1))
        assert got == BACKLOG + 1
        assert await slow.next(1) is None
        hub.close()

    async def test_nobody_is_wanted_when_nobody_listens(self):
        hub = Hub()
        with hub.subscribe(("alert",)):
            assert hub.wants("alert")
            assert not hub.wants("model")
        assert not hub.wants("alert")

    async def test_listeners_are_limited_and_end_with_the_daemon(self):
        hub = Hub()
        held = [hub.subscribe(("alert",)) for _ in range(SUBSCRIBERS)]
        with pytest.raises(UnavailableError):
            hub.subscribe(("alert",))
        waiting = asyncio.create_task(held[0].next(60))
        await asyncio.sleep(0)
        hub.close()
        assert await waiting is None


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


class TestLogFollower:
    """Whole lines, each once, whatever becomes of the file."""

    def test_gives_lines_once_they_are_whole(self, tmp_path: Path):
        path = tmp_path / "log"
        follower = LogFollower(path)
        assert follower.begin(5) == []
        with path.open("a") as log:
            log.write("one\ntw")
            log.flush()
            assert follower.read() == ["one"]
            log.write("o\n\x1b[31mthree\x1b[0m\n")
            log.flush()
            assert follower.read() == ["two", "three"]
            assert follower.read() == []

    def test_begins_with_the_last_lines(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("".join(f"line {number}\n" for number in range(100_000)))
        assert LogFollower(path).begin(2) == ["line 99998", "line 99999"]
        assert all(line.startswith("line ") for line in LogFollower(path).begin(1_000_000))

    def test_goes_on_after_a_cut_and_after_a_replacement(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("before\n" * 10)
        follower = LogFollower(path)
        follower.begin(0)
        path.write_text("cut\n")
        assert follower.read() == ["cut"]
        path.rename(tmp_path / "log.1")
        path.write_text("another file, longer than the last\n")
        assert follower.read() == ["another file, longer than the last"]

    def test_says_what_it_left_out_of_a_flood(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("begin\n")
        follower = LogFollower(path)
        follower.begin(1)
        with path.open("a") as log:
            log.write(("x" * 99 + "\n") * (MOST_BYTES // 50))
        lines = follower.read()
        assert lines[0].endswith("bytes left out]")
        assert len(lines) <= MOST_BYTES // 100 + 2
