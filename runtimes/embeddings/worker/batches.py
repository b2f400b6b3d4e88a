"""Dynamic batching: the items of concurrent requests are computed together, and fairly.

While the model computes one batch, requests queue. The next batch takes items from all of them in turn, so that a request of
a thousand texts doesn't delay one of a single text. A batch is bounded by its padded size: the number of items times the size
of the largest. When a client disconnects, the rest of its items is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from runtimes.sdk.errors import queue_full

In = TypeVar("In")
Out = TypeVar("Out")

Compute = Callable[[list[In]], Awaitable[Sequence[Out]]]


@dataclass(slots=True, eq=False)
class _Request(Generic[In, Out]):
    items: deque[tuple[int, In]]
    results: list[Out | None]
    done: asyncio.Future[None]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.items)


class Batches(Generic[In, Out]):
    """Computes lists of items. `size` gives an item's size, `most` limits a batch's, `queue` the waiting requests."""

    def __init__(self, compute: Compute[In, Out], size: Callable[[In], int], most: int, queue: int) -> None:
        self._compute, self._size, self._most, self._queue = compute, size, most, queue
        self._waiting: deque[_Request[In, Out]] = deque()  # requests with items that are in no batch yet
        self._working: asyncio.Task[None] | None = None

    async def of(self, items: Sequence[In]) -> list[Out]:
        """The results, in the items' order. Cancelling drops the items that are in no batch yet.

        Raises WorkerError `queue_full`, and whatever the computation raises.
        """
        if not items:
            return []
        if len(self._waiting) >= self._queue:
            raise queue_full(len(self._waiting))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request: _Request[In, Out] = _Request(deque(enumerate(items)), [None] * len(items), done)
        self._waiting.append(request)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        try:
            await done
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
        return [result for result in request.results if result is not None]

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch = self._next()
                try:
                    results = await self._compute([item for _, _, item in batch])
                except Exception as error:  # noqa: BLE001  # passed to the requests of this batch
                    for request in {id(request): request for request, _, _ in batch}.values():
                        self._fail(request, error)
                else:
                    for (request, place, _), result in zip(batch, results, strict=True):
                        self._deliver(request, place, result)
        finally:
            self._working = None

    def _next(self) -> list[tuple[_Request[In, Out], int, In]]:
        """One item of each request in turn, until the batch is full."""
        batch: list[tuple[_Request[In, Out], int, In]] = []
        largest = 0
        while self._waiting:
            request = self._waiting[0]
            place, item = request.items[0]
            largest = max(largest, self._size(item))
            if batch and largest * (len(batch) + 1) > self._most:
                break
            request.items.popleft()
            batch.append((request, place, item))
            self._waiting.popleft()
            if request.items:
                self._waiting.append(request)
        return batch

    @staticmethod
    def _deliver(request: _Request[In, Out], place: int, result: Out) -> None:
        request.results[place] = result
        request.missing -= 1
        if request.missing == 0 and not request.done.done():
            request.done.set_result(None)

    def _fail(self, request: _Request[In, Out], error: Exception) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        if not request.done.done():
            request.done.set_exception(error)
