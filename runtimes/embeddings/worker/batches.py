"""Dynamic batching: the items of concurrent requests are computed together, and fairly.

While the model computes one batch, requests queue. The next batch takes items from all of them in turn, so that a request of
a thousand texts doesn't delay one of a single text. A batch is bounded by its padded size: the number of items times the size
of the largest. When a client disconnects, the rest of its items is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from runtimes.sdk.errors import queue_full

In = TypeVar("In")
Out = TypeVar("Out")

Compute = Callable[[list[In]], Awaitable[Sequence[Out]]]


class Batches(Generic[In, Out]):
    """Computes lists of items. `size` gives an item's size, `most` limits a batch's, `queue` the waiting requests."""

    def __init__(self, compute: Compute[In, Out], size: Callable[[In], int], most: int, queue: int) -> None:
        self._compute, self._size, self._max_size, self._queue = compute, size, most, queue
        # requests with items that are in no batch yet, each item with its result
        self._waiting: deque[deque[tuple[In, asyncio.Future[Out]]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def run(self, items: Sequence[In]) -> list[Out]:
        """The results in the order of the items. Cancelling drops the items that are in no batch yet.

        Raises WorkerError `queue_full`, and whatever the computation raises.
        """
        if not items:
            return []
        if len(self._waiting) >= self._queue:
            raise queue_full(len(self._waiting))
        loop = asyncio.get_running_loop()
        results: list[asyncio.Future[Out]] = [loop.create_future() for _ in items]
        request = deque(zip(items, results, strict=True))
        self._waiting.append(request)
        if self._task is None:
            self._task = asyncio.create_task(self._run_batches())
        try:
            return await asyncio.gather(*results)
        finally:
            # By identity: a comparison of tensors has no truth value.
            self._waiting = deque(each for each in self._waiting if each is not request)

    async def _run_batches(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    computed = await self._compute([item for item, _ in batch])
                except Exception as error:  # noqa: BLE001  # passed to the requests of this batch
                    for _, result in batch:
                        if not result.done():
                            result.set_exception(error)
                else:
                    for (_, result), value in zip(batch, computed, strict=True):
                        if not result.done():
                            result.set_result(value)
        finally:
            self._task = None

    def _next_batch(self) -> list[tuple[In, asyncio.Future[Out]]]:
        """The next batch: one item of each request in turn, until the batch is full."""
        batch: list[tuple[In, asyncio.Future[Out]]] = []
        largest = 0
        while self._waiting:
            request = self._waiting[0]
            largest = max(largest, self._size(request[0][0]))
            if batch and largest * (len(batch) + 1) > self._max_size:
                break
            batch.append(request.popleft())
            self._waiting.popleft()
            if request:
                self._waiting.append(request)
        return batch
