"""A simulated machine for each test."""

from __future__ import annotations

import pytest

from tests.support.simulation import World


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.replays(), "a replay decides the same"
