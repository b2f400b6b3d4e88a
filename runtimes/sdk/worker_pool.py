"""Threads for blocking model work: a fixed number, a bounded queue, and cancellation when a client disconnects.

The work gets a `Cancel` that it checks between its steps. A slot is free again when the work has really ended, not when its
client disconnected: a model that can't be interrupted keeps its slot until it is done. An idle pool soon returns unused
memory: otherwise the C library keeps the memory of large pictures and tensors, for each thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from runtimes.sdk.errors import queue_full

T = TypeVar("T")

TRIM_DELAY_S: Final = 1.0
_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", lambda _kept: None)  # musl lacks it, and keeps less memory


class CancelledWorkError(Exception):
    """The work was cancelled: nobody waits for it."""


class Cancel:
    """A cancellation flag. The event loop sets it, threads check it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Tell the work to end."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Should the work end?"""
        return self._event.is_set()

    def check(self) -> None:
        """Raises CancelledWorkError when the work should end."""
        if self._event.is_set():
            raise CancelledWorkError


class WorkerPool:
    """`width` threads; at most `queue` calls wait for one."""

    def __init__(self, width: int, queue: int) -> None:
        self._slots = asyncio.Semaphore(width)
        self._pool = ThreadPoolExecutor(width, thread_name_prefix="model")
        self._queue = queue
        self.waiting = 0
        self.running = 0
        self._trim_timer: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[Cancel], T], *, again: bool = False) -> T:
        """Run the work and return its result. Cancelling sets the work's `Cancel`, and doesn't wait for the work.

        `again`: the request has had a slot before, so it is never refused. Raises WorkerError `queue_full`, and whatever the
        work raises.
        """
        cancel = Cancel()
        await self._acquire_slot(again=again)
        future = self._submit(lambda: work(cancel))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancel.set()
            raise

    def stream(self, work: Callable[[Cancel], Iterator[T]]) -> AsyncGenerator[T]:
        """Run the work, and yield its items. See `stream_pushed`."""

        def produce(cancel: Cancel, put: Callable[[T], None]) -> None:
            for item in work(cancel):
                put(item)

        return self.stream_pushed(produce)

    async def stream_pushed(self, work: Callable[[Cancel, Callable[[T], None]], None]) -> AsyncGenerator[T]:
        """Run the work, and yield each item that it passes to the function it gets.

        Closing the iterator sets the work's `Cancel`, and doesn't wait for the work. From then on the function raises
        CancelledWorkError.

        There is no back pressure, so all items together must be small: text, or a few pictures. For large items call `run`
        for each one. Raises WorkerError `queue_full` before the first item, and whatever the work raises.
        """
        loop, cancel = asyncio.get_running_loop(), Cancel()
        items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

        def put(item: T) -> None:
            cancel.check()
            loop.call_soon_threadsafe(items.put_nowait, (item,))

        def produce() -> None:
            try:
                work(cancel, put)
            except CancelledWorkError:
                pass
            finally:
                loop.call_soon_threadsafe(items.put_nowait, None)

        await self._acquire_slot(again=False)
        future = self._submit(produce)
        try:
            while (item := await items.get()) is not None:
                yield item[0]
            await asyncio.wrap_future(future)  # raises what the work raised
        finally:
            cancel.set()

    async def _acquire_slot(self, *, again: bool) -> None:
        if not again and self._slots.locked() and self.waiting >= self._queue:
            raise queue_full(self.waiting)
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        if self._trim_timer is not None:
            self._trim_timer.cancel()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        future.add_done_callback(lambda _done: loop.call_soon_threadsafe(self._release_slot))
        return future

    def _release_slot(self) -> None:
        self.running -= 1
        self._slots.release()
        if not self.running:
            self._trim_timer = asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._pool.submit, _TRIM, 0)
