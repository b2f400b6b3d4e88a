"""Splits work on many items into slices, so that it never blocks the loop for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

SLICE_S: Final = 0.002  # the length of a slice
_T = TypeVar("_T")


async def slices(items: Iterable[_T]) -> AsyncIterator[list[_T]]:
    """The items, in lists of those produced within `SLICE_S`. After each list other tasks get a turn of the loop.

    The iterator must not walk over a collection that other turns change. Later items may reflect changes after earlier ones.
    """
    made: list[_T] = []
    until = time.perf_counter() + SLICE_S
    for item in items:
        made.append(item)
        if time.perf_counter() >= until:
            yield made
            made = []
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S
    if made:
        yield made
