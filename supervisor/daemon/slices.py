"""Work on many things in slices: none holds the loop up, however many there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

SLICE_S: Final = 0.002  # how long it is worked on before others get a turn
_T = TypeVar("_T")


async def slices(items: Iterable[_T]) -> AsyncIterator[list[_T]]:
    """The items, in lists of those that were made within `SLICE_S`; others get a turn of the loop after each.

    An iterator must not walk over what other turns change. Later items may tell of what has changed since earlier ones.
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
