"""What the old daemon does after a hand-over: what runs here runs to its end, and nobody is refused."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import uvicorn

from supervisor.daemon.takeover import Takeover
from supervisor.http.response_cycle import ResponseCycle

LOOK_S = 0.1


async def drain_and_exit(server: uvicorn.Server, stopping: asyncio.Event, takeover: Takeover | None) -> None:
    """Until every connection here has ended, and our own predecessor's requests, or a signal comes.

    The successor accepts new connections. Idle ones stay until their time is over: whoever closes must not be us, while a
    client sends. Each response tells its client to connect anew.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing left to reload
    for accepting in server.servers:
        accepting.close()
    ResponseCycle.leaving = True
    # Our successor knows our predecessor's requests through us alone.
    while not stopping.is_set() and (server.server_state.connections or (takeover is not None and takeover.running)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stopping.wait()
