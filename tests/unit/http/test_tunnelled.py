"""A WebSocket through which nothing passes counts as a client that has stopped reading."""

from __future__ import annotations

import asyncio

from supervisor.http.tunnelled import SILENT_S, TunnelledClient


class Clock:
    """A loop's time, and nothing else of it."""

    def __init__(self):
        self.now = 0.0
        self.get_debug = asyncio.get_running_loop().get_debug

    def time(self):
        return self.now


async def test_silence():
    clock = Clock()
    client = TunnelledClient(clock, asyncio.Transport())
    clock.now = SILENT_S - 1
    assert not client.is_silent()
    client.came(b"x")
    clock.now += SILENT_S - 1
    assert not client.is_silent()
    clock.now += 1
    assert client.is_silent()
    assert await client.received.read(9) == b"x"
