"""The tables of docs/reliability.md name tests that are there."""

from __future__ import annotations

from tests.faults.table import TABLE
from tools import reliability


class TestFaults:
    """Each fault has a test, or a reason why not."""

    def test_numbers(self):
        assert [fault.number for fault in TABLE] == list(range(1, len(TABLE) + 1))

    def test_each_has_a_test_of_its_number(self):
        without = [fault.number for fault in TABLE if not reliability.tests_of(fault) and not fault.missing]
        assert without == []

    def test_what_is_missing_has_none(self):
        assert [fault.number for fault in TABLE if fault.missing and reliability.tests_of(fault)] == []

    def test_all_named_tests_are_there(self):
        assert [test for test in reliability.all_tests() if not reliability.is_there(test)] == []

    def test_one_that_is_not_there(self):
        here = "tests/unit/tools/test_reliability.py"
        assert reliability.is_there(f"{here}::TestFaults::test_numbers")
        for gone in (f"{here}::TestFaults::test_gone", f"{here}::TestGone", "tests/unit/tools/test_gone.py"):
            assert not reliability.is_there(gone)


class TestFigures:
    """What is measured is shown with its unit."""

    def test_units(self):
        assert (reliability.words("tree_gone_s"), reliability.shown("tree_gone_s", 0.12345)) == ("tree gone", "0.123 s")
        assert (reliability.words("spawns"), reliability.shown("spawns", 1)) == ("spawns", "1")
        assert reliability.shown("memory_mib", [58.1, 59.4]) == "58.1 → 59.4 MiB"
        assert reliability.shown("statuses", {"200": 5, "502": 1}) == "200 5, 502 1"
