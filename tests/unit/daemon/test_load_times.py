"""How much longer a load takes, as it tells it."""

from __future__ import annotations

import pytest

from supervisor.core.types import ModelId
from supervisor.daemon.loads import MOST_SHARE, Load
from tests.support.cases import cases


def load(**more) -> Load:
    return Load("1", ModelId("m"), 100.0, "loading", started_at=100.0, **more)


@cases(
    ("known", "eta_s"),
    [
        ({}, None),
        ({"share": 0.01}, None),
        ({"share": 0.25}, 30.0),
        ({"share": MOST_SHARE}, None),  # all is read: what else the program does takes as long as it takes
        ({"expected_s": 15.0}, 5.0),
        ({"expected_s": 15.0, "share": 0.25}, 5.0),
        ({"expected_s": 5.0, "share": 0.25}, 30.0),
        ({"expected_s": 5.0, "share": MOST_SHARE}, None),
    ],
)
def test_time_left(known, eta_s):
    assert load(**known).eta_s(now=110.0) == (None if eta_s is None else pytest.approx(eta_s))
