"""Many calls at once: a few in each turn of the loop, all of them, in their order."""

from __future__ import annotations

import asyncio

from supervisor.http.crowd import Crowd


async def test_a_few_in_each_turn():
    crowd, called, turns = Crowd(most=3), [], []
    for number in range(10):
        crowd.call(lambda number=number: called.append(number))
    while len(called) < 10:
        turns.append(len(called))
        await asyncio.sleep(0)
    assert called == list(range(10))
    assert turns == [3, 6, 9]


async def test_one_that_comes_alone_is_called_at_once():
    crowd, called = Crowd(most=1), []
    for number in range(3):
        crowd.call(lambda number=number: called.append(number))
        assert called[-1] == number
        for _ in range(2):
            await asyncio.sleep(0)


def test_another_loop_begins_anew():
    crowd, called = Crowd(most=1), []

    async def leave() -> None:
        crowd.call(lambda: called.append(1))
        crowd.call(lambda: called.append(2))

    for _ in range(2):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave())
        loop.close()
    assert called.count(1) == 2
