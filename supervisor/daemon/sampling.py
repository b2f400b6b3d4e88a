"""When memory is read: every two seconds, eight times as often while a load waits for memory, and at once on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger("llmux.engine")

IMPATIENT_S = 0.25
IDLE_S = 2.0


class Sampling:
    """Calls `sample` again and again. Use from the event loop's thread."""

    def __init__(self, sample: Callable[[], Awaitable[None]], is_impatient: Callable[[], bool]) -> None:
        self._sample = sample
        self._is_impatient = is_impatient
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Call once, on the running loop."""
        self._task = asyncio.create_task(self._run(), name="memory-sampling")

    def stop(self) -> None:
        """Stop; a running reading is dropped."""
        if self._task is not None:
            self._task.cancel()

    def soon(self) -> None:
        """Read as soon as the loop is free."""
        self._now.set()

    async def _run(self) -> None:
        while True:
            self._now.clear()
            try:
                await self._sample()
            except Exception:
                log.exception("memory.sampling_failed")  # a bug of ours must not end the readings for good
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IMPATIENT_S if self._is_impatient() else IDLE_S):
                    await self._now.wait()
