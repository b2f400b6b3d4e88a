"""Detects that clients disconnected, although the server reads nothing from them: a few clients in each turn of the loop.

- `Crowd` spreads the work. Thousands of clients may disconnect at once, and each takes some time to clean up.
- `HangUps` watches connections only for their end, with one epoll for all connections. The event loop itself would read the end
  of every connection in the turn in which it comes, which takes 10 µs for each.
- `HalfClosed` distinguishes a client that disconnected from one that only closed its sending side (`nc -N`): both sent a FIN.
  The kernel of a disconnected client answers further bytes with a reset, at once. So the server sends a few bytes without
  effect (`ResponseCycle.probe`), and from then on watches the connection for the reset. The event loop would miss the reset:
  after the end of the input it no longer watches the socket. A client that disconnects later is found by a later probe, or by
  the next chunk of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections import deque
from collections.abc import Callable
from typing import Final

MOST_IN_A_TURN: Final = 32  # clients; each takes less than 0.1 ms, with its work in the next turn
PROBE_EVERY_S: Final = 10.0
MOST_PROBES: Final = 12  # parsers accept 16 digits of a chunk's size


class Crowd:
    """Makes at most `most` calls in a turn of the running loop: the first ones at once, the others in order, in later turns."""

    def __init__(self, most: int = MOST_IN_A_TURN) -> None:
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made = 0  # in this turn of the loop
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` now or soon. It must not raise."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # tests use several loops in sequence
            self._loop, self._made, self._waiting = loop, 0, deque()
        self._waiting.append(callback)
        if self._made < self._most:
            self._call_next(loop)

    def _call_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._made:
            loop.call_soon(self._begin_turn, loop)
        self._made += 1
        self._waiting.popleft()()

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._made = 0
        while self._waiting and self._made < self._most:
            self._call_next(loop)


class HangUps:
    """Watches connections of one loop at a time. Use from that loop's thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}  # by descriptor
        self._epoll: select.epoll
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Create the epoll for the running loop, once: later there may be no free descriptor. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._epoll, self._loop = select.epoll(), loop
            loop.add_reader(self._epoll.fileno(), self._run_callbacks)

    def watch(self, descriptor: int, events: int, callback: Callable[[], None]) -> None:
        """Call `callback` once: at these epoll events, or when the connection is reset. Watch no descriptor twice."""
        self._epoll.register(descriptor, events | select.EPOLLET)
        self._calls[descriptor] = callback

    def forget(self, descriptor: int) -> None:
        """Stop watching. Call this before the descriptor is closed."""
        del self._calls[descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)

    def _run_callbacks(self) -> None:
        for descriptor, _ in self._epoll.poll(0, MOST_IN_A_TURN):
            if (callback := self._calls.get(descriptor)) is not None:
                callback()


class HalfClosed:
    """Aborts the transport of a client that sent a FIN once the client resets the connection, until `close`.

    `probe` provokes the reset, or returns False if that is impossible.
    """

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bool]) -> None:
        self._probe = probe
        self._probes_left = MOST_PROBES
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = transport.get_extra_info("socket").fileno()
        HANG_UPS.watch(self._descriptor, 0, transport.abort)

    def is_alive(self) -> bool:
        """Probe now, and again every `PROBE_EVERY_S`. False: it can't be found out whether the client is alive."""
        self._probes_left -= 1
        if self._probes_left:
            self._timer = asyncio.get_running_loop().call_later(PROBE_EVERY_S, self.is_alive)
        return self._probe()

    def close(self) -> None:
        """Stop watching and probing."""
        if self._timer is not None:
            self._timer.cancel()
        HANG_UPS.forget(self._descriptor)


DISCONNECTS: Final = Crowd()
HANG_UPS: Final = HangUps()
