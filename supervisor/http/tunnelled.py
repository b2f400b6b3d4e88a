"""What a client sends through a WebSocket, and whether anything passes there."""

from __future__ import annotations

import asyncio
from typing import Final

SILENT_S: Final = 30.0
_HELD: Final = 64 * 1024  # bytes of the client's; twice as many, and it isn't read


class TunnelledClient:
    """One that has a WebSocket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self.received = asyncio.StreamReader(_HELD, loop)
        self.received.set_transport(transport)
        self.last_at = loop.time()  # when something passed, in either direction
        self._loop = loop

    def came(self, data: bytes) -> None:
        """It sent this."""
        self.last_at = self._loop.time()
        self.received.feed_data(data)

    def is_silent(self) -> bool:
        """Has nothing passed for so long that it counts as one who has stopped reading?"""
        return self._loop.time() - self.last_at >= SILENT_S
