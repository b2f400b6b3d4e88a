"""Tokens on their way from the model's thread to the answer's."""

from __future__ import annotations

import pytest

from runtimes.sdk.chat.tokens import Results, Token


def test_they_come_in_order_and_end_once():
    results = Results()
    for item in (Token(1), Token(2), "length", Token(3)):
        results.put(item)
    assert [*results] == [Token(1), Token(2), "length"]


def test_an_error_is_raised_after_what_came_before_it():
    results = Results()
    for item in (Token(1), ValueError("broken")):
        results.put(item)
    coming = iter(results)
    assert next(coming) == Token(1)
    with pytest.raises(ValueError, match="broken"):
        next(coming)
