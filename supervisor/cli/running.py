"""A daemon that serves: from the moment it listens until a signal ends it, or a successor has taken over.

On SIGTERM or SIGINT new requests are refused while running ones end within the drain time, then the workers are stopped,
then the server; a second signal cuts the drain short. After a hand-over nothing is refused and nothing is stopped: what
runs here runs to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog
import uvicorn

from supervisor.core.events import UnloadAsked
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.handover import Handover
from supervisor.daemon.reload import Reloader
from supervisor.daemon.takeover import Takeover
from supervisor.http.app import Application
from supervisor.http.protocol import GuardedProtocol
from supervisor.http.response_cycle import ResponseCycle
from supervisor.io import notify

log = structlog.get_logger("llmux.daemon")

BACKLOG = 2048
OWN_STOP_S = 20.0  # of the end, besides requests and graces: unkillable workers are waited for, too
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: whoever closes first must not be us, while they send
LOOK_S = 0.1


@dataclass(slots=True)
class Running:
    """The parts of a daemon that serves. `takeover`: it has a predecessor."""

    daemon: Daemon
    application: Application
    reloader: Reloader
    handover: Handover
    takeover: Takeover | None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_stopped(self, listener: socket.socket) -> None:
        """Serve on this socket until the end."""
        server = _Server(_server_config(self.application))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self.reloader.begin, "SIGHUP")
        self.daemon.engine.start()
        _settle_garbage_collector()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait({serving, asyncio.create_task(server.up.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if self.takeover is not None:
            await self.takeover.serves(self.daemon)
        self.handover.listen()
        background = [asyncio.create_task(_feed_watchdog()), asyncio.create_task(self.reloader.watch())]
        notify.notify("READY=1", f"STATUS=serving {len(self.daemon.catalog.listing())} models")
        ends = {serving, *(asyncio.create_task(event.wait()) for event in (self.stopping, self.handover.done))}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self.handover.done.is_set():
            await self.handover.close()
        if self.handover.done.is_set():
            for task in background:
                task.cancel()
            await self._see_out(server)
        else:
            await self._drain()
        self.application.close()
        server.should_exit = True
        await serving
        await self.handover.close()
        for task in background:
            task.cancel()
        log.info("daemon.stopped")

    async def _drain(self) -> None:
        log.info("daemon.stopping")
        # At most as long as the running requests, then the slowest worker, then what is ours.
        graces = [model.config.grace_s for model in self.daemon.catalog.models.values()]
        notify.stopping(self.daemon.catalog.limits.drain_s + max(graces, default=0.0) + OWN_STOP_S)
        await self.daemon.engine.shutdown()

    async def _see_out(self, server: _Server) -> None:
        """Until every connection here has ended, or a signal.

        The successor accepts new ones. Idle ones stay until their time is over: whoever closes must not be us, while a
        client sends. Each response tells its client to connect anew.
        """
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        for accepting in server.servers:
            accepting.close()
        ResponseCycle.leaving = True
        self.application.close()
        while not self.stopping.is_set() and (server.server_state.connections or self._predecessor_runs()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.stopping.wait()

    def _predecessor_runs(self) -> bool:
        """Whose requests does our successor know through us alone?"""
        return self.takeover is not None and self.takeover.running > 0

    def _on_signal(self) -> None:
        if self.stopping.is_set():  # again: whoever asks twice does not want to wait for streams
            for model in self.daemon.engine.models():
                self.daemon.engine.post(UnloadAsked(model.id, force=True))
        self.stopping.set()


def _server_config(application: Application) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=GuardedProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on who the client says it is
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        timeout_graceful_shutdown=5,
    )


def _settle_garbage_collector() -> None:
    """What is there now stays: never look through it again, and look for new cycles less often.

    Requests are freed by their reference counts. With the defaults the collector took an eighth of a busy daemon's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _feed_watchdog() -> None:
    """Tell systemd that the event loop runs, as often as it wants to hear it."""
    interval_s = notify.watchdog_interval_s()
    while interval_s is not None:
        notify.notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: ours drain first. `up` is set once it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
