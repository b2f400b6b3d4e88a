"""When a client has to pause, over any times at which it may come."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.core.cooldown import Cooldown, CooldownRule

GAPS = st.lists(st.integers(0, 40), max_size=60)
BURSTS = st.integers(1, 8)
WINDOW_S = 60
START = 1_000_000.0


def most_in_a_window(times: list[int]) -> int:
    """Half open, as the bucket runs: what comes a whole window later is in the next one."""
    return max((sum(first <= time < first + WINDOW_S for time in times) for first in times), default=0)


class TestBurst:
    """Whoever keeps within it never pauses; whoever sends more than twice as many surely does."""

    @given(GAPS, BURSTS)
    @example([0, 0, 60, 0], 2)
    def test_who_keeps_within_it(self, gaps, burst):
        times = [*accumulate(gaps)]
        cooldown, rule = Cooldown(), CooldownRule(burst=burst, window_s=WINDOW_S)
        pauses = [cooldown.arrived(rule, START + time) for time in times]
        if most_in_a_window(times) <= burst:
            assert not any(pauses)

    @given(GAPS, BURSTS)
    def test_who_sends_far_more(self, gaps, burst):
        times = [*accumulate(gaps)]
        cooldown, rule = Cooldown(), CooldownRule(burst=burst, window_s=WINDOW_S)
        pauses = [cooldown.arrived(rule, START + time) for time in times]
        if most_in_a_window(times) > 2 * burst:
            assert any(pauses)

    def test_at_once(self):
        cooldown, rule = Cooldown(), CooldownRule(burst=3, window_s=60, pause_s=30)
        assert [cooldown.arrived(rule, START) for _ in range(5)] == [0, 0, 0, 30, 30]
        assert cooldown.reason == "it sent more than 3 requests within 60 s"


class TestErrors:
    """So many failures in a row begin a pause; a success between them doesn't."""

    @given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
    def test_in_a_row(self, outcomes, limit):
        cooldown, rule = Cooldown(), CooldownRule(errors=limit, pause_s=0.5)
        row = 0
        for second, failed in enumerate(outcomes):
            now = START + second
            cooldown.ended(rule, now, failed=failed)
            row = row + 1 if failed else 0
            assert cooldown.left_s(now) == (0.5 if row == limit else 0)
            row %= limit


class TestPause:
    """It has one length, whatever is refused or fails meanwhile; after it everything is counted anew."""

    @given(GAPS, st.lists(st.booleans(), min_size=60, max_size=60))
    def test_length(self, gaps, outcomes):
        cooldown, rule = Cooldown(), CooldownRule(errors=2, burst=3, window_s=WINDOW_S, pause_s=30)
        begun = None
        for time, failed in zip(accumulate(gaps), outcomes, strict=False):
            now = START + time
            before = cooldown.until
            if cooldown.arrived(rule, now) == 0:
                cooldown.ended(rule, now, failed=failed)
            if cooldown.until != before:
                assert begun is None or now >= begun + 30, "a pause doesn't begin within another"
                assert cooldown.until == now + 30
                begun = now

    def test_what_was_under_way_counts_for_nothing(self):
        cooldown, rule = Cooldown(), CooldownRule(errors=2, pause_s=30)
        for _ in range(9):
            cooldown.ended(rule, START, failed=True)
        assert cooldown.until == START + 30
        cooldown.ended(rule, START + 31, failed=True)
        assert cooldown.left_s(START + 31) == 0

    def test_an_operator_ends_it(self):
        cooldown, rule = Cooldown(), CooldownRule(burst=1)
        assert [cooldown.arrived(rule, START) for _ in range(2)] == [0, 30]
        cooldown.pause(START + 1, 0, "")
        assert cooldown.arrived(rule, START + 1) == 0

    @given(GAPS)
    def test_no_rule(self, gaps):
        cooldown = Cooldown()
        for time in accumulate(gaps):
            assert cooldown.arrived(CooldownRule(), START + time) == 0
            cooldown.ended(CooldownRule(), START + time, failed=True)
