"""A client that has sent all it wants to say (`nc -N`) and a client that left look the same: both sent a FIN.

They are told apart by what they do with further bytes: the kernel of one that left answers them with a reset, at once. So a
few bytes that change nothing are sent (`ResponseCycle.probe`), and from then on the connection is watched for the reset. The
event loop would not notice it: after the end of the input it no longer looks at the socket. A client that leaves later is
found by a later probe, or by the next piece of its answer.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

AGAIN_S: Final = 10.0
MOST_PROBES: Final = 12  # parsers take 16 digits of a chunk's size


class HalfClosed:
    """Calls `gone` when the client's connection is reset, until `close`. `probe` provokes that, or returns False."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        probe: Callable[[], bool],
        gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._probe = probe
        self._left = MOST_PROBES
        self._epoll = select.epoll(1)
        self._epoll.register(transport.get_extra_info("socket").fileno(), select.EPOLLET)  # only errors and hang-ups
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), gone)

    def is_alive(self) -> bool:
        """Probe now, and again later. False: there is no way to tell."""
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(AGAIN_S, self.is_alive)
        return self._probe()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
