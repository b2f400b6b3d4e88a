"""The loops that read the memory: every two seconds, eight times as often while a load waits for memory, and at once on demand.

Each source of readings has its own loop, so that a hanging source delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

import structlog

log = structlog.get_logger("llmux.engine")

IMPATIENT_S = 0.25
IDLE_S = 2.0


class Sampling:
    """Calls each of `samples` periodically. Use from the event loop's thread."""

    def __init__(self, samples: Iterable[Callable[[], Awaitable[None]]], is_impatient: Callable[[], bool]) -> None:
        self._samples = [(sample, asyncio.Event()) for sample in samples]
        self._is_impatient = is_impatient
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read. Call it once, on the running loop."""
        self._tasks = [
            asyncio.create_task(self._sample_forever(*each), name="memory-sampling") for each in self._samples
        ]

    def stop(self) -> None:
        """Stop reading, and drop the readings that are under way."""
        for task in self._tasks:
            task.cancel()

    def soon(self) -> None:
        """Read as soon as the loop is free."""
        for _, now in self._samples:
            now.set()

    async def _sample_forever(self, sample: Callable[[], Awaitable[None]], now: asyncio.Event) -> None:
        while True:
            now.clear()
            try:
                await sample()
            except Exception:
                log.exception("memory.sampling_failed")  # a bug in llmux must not stop the readings for ever
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IMPATIENT_S if self._is_impatient() else IDLE_S):
                    await now.wait()
