"""Loads with other settings: what a setting must be, in words."""

from __future__ import annotations

import pytest

from supervisor.catalog.overrides import expected


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 6}, "a whole number from 1 to 6"),
        ({"type": "integer", "exclusiveMinimum": 0}, "a whole number greater than 0"),
        ({"type": "boolean"}, "true or false"),
        ({"enum": ["on", "off"], "type": "string"}, "one of on, off"),
        ({"anyOf": [{"type": "integer", "minimum": -1}, {"const": "all"}]}, 'a whole number of at least -1 or "all"'),
    ],
)
def test_a_constraint_in_words(constraint, words):
    assert words == expected(constraint)
