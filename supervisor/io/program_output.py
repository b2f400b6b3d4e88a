"""What a program prints, read as fast as it is wanted: the end of a pipe in the loop.

It is no transport of the loop's: uvloop closes the descriptor of one twice, and the second time it may be what another thread
has just opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

PIECE: Final = 64 * 1024


class ProgramOutput:
    """The end that we read. One reader."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._ready: asyncio.Future[None] | None = None  # set iff somebody waits

    async def read(self) -> bytes:
        """The next piece; empty at the end. Always lets others have a turn."""
        while True:
            self._ready = self._loop.create_future()
            self._loop.add_reader(self._descriptor, self._is_ready, self._ready)
            try:
                await self._ready
            finally:
                self._stop_waiting()
            with contextlib.suppress(BlockingIOError):
                return os.read(self._descriptor, PIECE)

    def close(self) -> None:
        """Once. Whoever waits is cancelled."""
        if self._ready is not None:
            self._ready.cancel()
            self._stop_waiting()
        os.close(self._descriptor)

    @staticmethod
    def _is_ready(ready: asyncio.Future[None]) -> None:
        if not ready.done():
            ready.set_result(None)

    def _stop_waiting(self) -> None:
        if self._ready is not None:
            self._ready = None
            self._loop.remove_reader(self._descriptor)


def pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[ProgramOutput, int]:
    """The end that we read, and the program's."""
    out, into = os.pipe2(os.O_CLOEXEC)
    theirs.callback(os.close, into)
    return ours.enter_context(contextlib.closing(ProgramOutput(out))), into
