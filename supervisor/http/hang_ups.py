"""Connections that are watched for their end and nothing else: one epoll for all, which tells of a few in each turn of the loop.

The event loop itself reads the end of every connection that has one in the same turn: 10 µs for each, and thousands of
clients may leave at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Final

from supervisor.http.crowd import MOST_IN_A_TURN


class HangUps:
    """For one loop at a time. Use from its thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}  # by descriptor
        self._epoll: select.epoll
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Be ready: later there may be no descriptor left. Harmless when it is open. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._epoll, self._loop = select.epoll(), loop
            loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, descriptor: int, events: int, call: Callable[[], None]) -> None:
        """Call it once: at these events, or when the connection is reset. Not twice for one descriptor."""
        self._epoll.register(descriptor, events | select.EPOLLET)
        self._calls[descriptor] = call

    def forget(self, descriptor: int) -> None:
        """Call it before the descriptor is closed."""
        del self._calls[descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)

    def _look(self) -> None:
        for descriptor, _ in self._epoll.poll(0, MOST_IN_A_TURN):
            if (call := self._calls.get(descriptor)) is not None:
                call()


HANG_UPS: Final = HangUps()
