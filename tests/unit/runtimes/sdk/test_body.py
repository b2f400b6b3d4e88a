"""Wrong values in requests: the error names the expected value."""

from __future__ import annotations

import pytest

from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-1, (1 << 32) - 1, "from -1 to 4294967295"),
        (0.01, 10.0, "from 0.01 to 10"),
        (-(1 << 63), (1 << 63) - 1, "at most 9223372036854775807"),
    ],
)
def test_bounds_are_written_with_all_of_their_digits(low, high, expected):
    with pytest.raises(WorkerError, match=rf"^seed is 1\d+, but must be {expected}\.$") as refused:
        Body({"seed": 10**30}).number("seed", None, low, high)
    assert refused.value.param == "seed"
