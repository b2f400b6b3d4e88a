"""Long work gives others turns of the loop, and loses nothing."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.daemon import slices as slices_module
from supervisor.daemon.slices import SLICE_S, slices


@pytest.fixture
def now(monkeypatch):
    """Seconds of the clock: it goes on only as far as a test says."""
    at = [0.0]
    monkeypatch.setattr(slices_module.time, "perf_counter", lambda: at[0])
    return at


async def test_others_get_a_turn_after_each_slice(now):
    turns, is_done = 0, False

    async def other() -> None:
        nonlocal turns
        while not is_done:
            turns += 1
            await asyncio.sleep(0)

    def work():
        for number in range(10):
            now[0] += SLICE_S / 2
            yield number

    task = asyncio.create_task(other())
    found = [made async for made in slices(work())]
    is_done = True
    await task
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert turns >= len(found)


async def test_little_work_is_one_slice_without_a_turn(now):
    assert [made async for made in slices(range(3))] == [[0, 1, 2]]
    assert [made async for made in slices(())] == []
