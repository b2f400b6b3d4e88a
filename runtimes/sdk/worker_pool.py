"""Turns for blocking model work: so many at once, a bounded number waiting, and an end for those whose client has left.

The work runs in threads and gets a `Cancel` to look at between its steps. A turn ends when the thread's work has really
ended, not when its client left: a model that can't be interrupted keeps its turn until it is done.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from runtimes.sdk.errors import queue_full

T = TypeVar("T")


class CancelledWorkError(Exception):
    """Nobody waits for this work any more."""


class Cancel:
    """Whether the work is still wanted. Threads look, the event loop sets."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """It isn't wanted any more."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Should the work end?"""
        return self._event.is_set()

    def check(self) -> None:
        """Raises CancelledWorkError when the work should end."""
        if self._event.is_set():
            raise CancelledWorkError


class Lane:
    """`width` pieces of work at once, in threads of its own; at most `queue` wait."""

    def __init__(self, width: int, queue: int) -> None:
        self._free = asyncio.Semaphore(width)
        self._pool = ThreadPoolExecutor(width, thread_name_prefix="model")
        self._queue = queue
        self.waiting = 0
        self.running = 0

    async def run(self, work: Callable[[Cancel], T], *, again: bool = False) -> T:
        """Do it and return what it returns. Cancelling tells the work and doesn't wait for it.

        `again`: for a request that has had a turn already; it is never refused. Raises WorkerError `queue_full`, and
        whatever the work raises.
        """
        cancel = Cancel()
        await self._turn(again=again)
        future = self._start(lambda: work(cancel))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancel.set()
            raise

    async def stream(self, work: Callable[[Cancel], Iterator[T]]) -> AsyncIterator[T]:
        """What it yields, as it comes. Closing the iterator tells the work and doesn't wait for it.

        The work doesn't wait for a slow reader either, so what it yields must be little in all: text. Where it is much,
        take a turn for each piece instead (`run`). Raises WorkerError `queue_full` before the first item, and whatever
        the work raises.
        """
        loop, cancel = asyncio.get_running_loop(), Cancel()
        items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

        def produce() -> None:
            try:
                for item in work(cancel):
                    cancel.check()
                    loop.call_soon_threadsafe(items.put_nowait, (item,))
            except CancelledWorkError:
                pass
            finally:
                loop.call_soon_threadsafe(items.put_nowait, None)

        await self._turn(again=False)
        future = self._start(produce)
        try:
            while (item := await items.get()) is not None:
                yield item[0]
            await asyncio.wrap_future(future)  # raises what the work raised
        finally:
            cancel.set()

    async def _turn(self, *, again: bool) -> None:
        if not again and self._free.locked() and self.waiting >= self._queue:
            raise queue_full(self.waiting)
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1

    def _start(self, work: Callable[[], T]) -> Future[T]:
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        future.add_done_callback(lambda _done: loop.call_soon_threadsafe(self._end))
        return future

    def _end(self) -> None:
        self.running -= 1
        self._free.release()
