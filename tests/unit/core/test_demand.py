"""What a word or a number says about a priority."""

from __future__ import annotations

import pytest

from supervisor.core.demand import HIGH, LOW, NORMAL, PRIORITIES, priority_of
from tests.support.cases import cases


class TestPriority:
    """A word, or a whole number from 0 to 100; a lower one is more urgent."""

    @cases(
        ("said", "number"),
        [("high", HIGH), ("normal", NORMAL), (" Low ", LOW), (0, 0), (100, 100), ("7", 7), ("007", 7)],
    )
    def test_what_is_one(self, said, number):
        assert priority_of(said) == number

    @cases("said", ["", "urgent", "-1", "101", "1.5", "٣", "9" * 5000, -1, 101, 1.5, True, [1], {}])
    def test_what_is_none(self, said):
        with pytest.raises(ValueError, match=r"high \(20\), normal \(50\), low \(80\), or a whole number from 0"):
            priority_of(said)

    def test_high_goes_first(self):
        assert sorted(PRIORITIES, key=PRIORITIES.__getitem__) == ["high", "normal", "low"]
