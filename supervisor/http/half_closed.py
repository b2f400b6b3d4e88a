"""A client that has sent all it wants to say (`nc -N`) and a client that left look the same: both sent a FIN.

They are told apart by what they do with further bytes: the kernel of one that left answers them with a reset, at once. So a
few bytes that change nothing are sent (`ResponseCycle.probe`), and from then on the connection is watched for the reset. The
event loop would not notice it: after the end of the input it no longer looks at the socket. A client that leaves later is
found by a later probe, or by the next piece of its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from supervisor.http.hang_ups import HANG_UPS

AGAIN_S: Final = 10.0
MOST_PROBES: Final = 12  # parsers take 16 digits of a chunk's size


class HalfClosed:
    """Aborts the transport when the client resets the connection, until `close`. `probe` provokes that, or returns False."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bool]) -> None:
        self._probe = probe
        self._left = MOST_PROBES
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = transport.get_extra_info("socket").fileno()
        HANG_UPS.watch(self._descriptor, 0, transport.abort)

    def is_alive(self) -> bool:
        """Probe now, and again later. False: there is no way to tell."""
        self._left -= 1
        if self._left:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self.is_alive)
        return self._probe()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        HANG_UPS.forget(self._descriptor)
