"""A test that goes through many cases fails for each that fails, and names it."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.support.cases import cases


def test_all_are_tried_and_those_that_fail_are_named():
    tried = []

    @cases("number, text", [(1, "a"), (2, "b"), (3, "c")])
    def check(number, text, fixture):
        tried.append((number, text, fixture))
        assert number == 1, f"{text} is wrong"

    assert [*inspect.signature(check).parameters] == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match="2 failed") as told:
        check(fixture=0)
    assert tried == [(1, "a", 0), (2, "b", 0), (3, "c", 0)]
    assert [each.__notes__ for each in told.value.exceptions] == [
        ["case: {'number': 2, 'text': 'b'}"],
        ["case: {'number': 3, 'text': 'c'}"],
    ]


def test_what_was_not_raised():
    @cases("value", [1, pytest.param("x", id="two")], ids=["one", "two"])
    async def check(value):
        with pytest.raises(ValueError, match=r"\bx\b"):
            int(value)

    with pytest.raises(BaseExceptionGroup, match="1 failed") as told:
        asyncio.run(check())
    assert [each.__notes__ for each in told.value.exceptions] == [["case: one"]]


def test_one_in_the_other():
    tried = []

    @cases("one", [1, 2])
    @cases("other", [3, 4])
    def check(one, other):
        tried.append((one, other))

    check()
    assert sorted(tried) == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_no_case_is_a_mistake():
    with pytest.raises(AssertionError, match="no case"):
        cases("value", [])
