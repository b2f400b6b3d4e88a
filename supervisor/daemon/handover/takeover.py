"""The successor's side of an upgrade: it checks everything first, and owns nothing before the commit.

See `handover` for the other side and the steps. Before the predecessor commits, the end of its messages means that the
handover failed. After the commit, it means that the predecessor is dead, and its requests have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import replace

import structlog

from supervisor.catalog.models.overrides import Override, overridden
from supervisor.core.events import Configured, PinRequested, RequestFinished, UnloadRequested, WorkerAdopted
from supervisor.core.types import REMOTE, DeviceSpec, ModelSpec, TicketId, base_of
from supervisor.daemon.daemon import Daemon
from supervisor.engine.handover_messages import (
    VERSION,
    HandoverState,
    TakeoverError,
    foreign,
    read_general,
    read_last,
    read_worker,
)
from supervisor.errors import InvalidRequestError
from supervisor.fleet.local import LocalLauncher
from supervisor.host.process.fd_channel import DESCRIPTORS, ChannelClosedError, FdChannel, Message
from supervisor.host.process.process import WorkerProcess
from supervisor.host.store.store import Store

log = structlog.get_logger("llmux.upgrade")


class Takeover:
    """A connection to the predecessor. Create it in the event loop's thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.stores: tuple[
            Store, ...
        ] = ()  # opened with `pending`: unchanged for the predecessor if the takeover fails
        self._channel = FdChannel(connection)
        self._inheritance: HandoverState
        self._last_messages: list[tuple[WorkerAdopted, bytes]] = []
        self._processes: list[WorkerProcess] = []
        self._running: set[TicketId] = set()  # the predecessor's requests
        self._follow_task: asyncio.Task[None] | None = None

    async def request_state(self, address: tuple[str, int]) -> HandoverState:
        """Request the handover. Returns copies of the predecessor's state. The predecessor may first wait for running loads.

        Raises TakeoverError.
        """
        try:
            await self._channel.send({"version": VERSION, "address": address})
            self._inheritance, count = read_general(await self._receive(DESCRIPTORS))
            for _ in range(count):
                worker = read_worker(await self._receive(DESCRIPTORS))
                self._inheritance.workers[worker.adopted.model, worker.adopted.generation] = worker
        except ChannelClosedError as error:
            raise TakeoverError("The running llmux ended before it handed anything over.") from error
        except (LookupError, TypeError, ValueError, AssertionError, InvalidRequestError) as error:
            raise await self.report_failure(f"the state of the running llmux can't be read: {error!r}") from error
        return self._inheritance

    def check(self, devices: Iterable[DeviceSpec]) -> None:
        """Raises TakeoverError for a worker that this daemon can't supervise."""
        known = {device.id for device in devices}.union(REMOTE)
        for worker in self._inheritance.workers.values():
            missing = sorted(set(worker.adopted.devices) - known)
            if missing:
                raise TakeoverError(
                    f"{worker.adopted.model} is loaded on {', '.join(missing)}, which the new configuration doesn't have: "
                    "unload it first, or restart."
                )

    async def report_failure(self, why: str) -> TakeoverError:
        """Report to the predecessor that it must continue. Returns the error to raise."""
        with contextlib.suppress(ChannelClosedError):
            await self._channel.send({"failed": why})
        return TakeoverError(why)

    async def report_prepared(self) -> None:
        """Report that we are ready. Returns after the commit. Raises TakeoverError if the predecessor keeps everything."""
        try:
            await self._channel.send({"prepared": True})
            while "commit" not in (content := (await self._receive()).content):
                self._last_messages.append(read_last(content, self._channel.pid))
        except ChannelClosedError as error:
            raise TakeoverError("The running llmux did not hand over, or has ended.") from error
        except (LookupError, TypeError, ValueError, AssertionError, InvalidRequestError) as error:
            raise await self.report_failure(f"the state of the running llmux can't be read: {error!r}") from error

    async def _receive(self, descriptors: int = 0) -> Message:
        message = await self._channel.receive(descriptors)
        if "refused" in message.content:
            raise TakeoverError(str(message.content["refused"]))
        return message

    def adopt(self, daemon: Daemon, launcher: LocalLauncher, configured: Configured) -> None:
        """Adopt the workers, then apply the configuration as a reload would. Does not wait."""
        workers, lock = self._inheritance.workers, self._inheritance.lock
        lock.sign()
        named = {adopted.model for adopted, _ in self._last_messages}
        specs = tuple(adopted.spec for adopted, _ in self._last_messages if adopted.spec.replica_of not in named)
        daemon.engine.post(replace(configured, models=specs))
        for adopted, heard in self._last_messages:
            worker = workers.pop((adopted.model, adopted.generation))
            process = worker.process(lock.instance, heard)
            key = adopted.model, adopted.generation
            started = launcher.adopt(key, process, worker.spec)
            daemon.fleet.adopt(
                key, daemon.fleet.models.get(base_of(adopted.model)), adopted.devices, started, daemon.engine.post
            )
            daemon.engine.post(adopted)
            self._processes.append(process)
            self._running.update(adopted.tickets)
        for worker in workers.values():
            worker.forget()
        models = tuple(self._with_override(daemon, spec) for spec in configured.models)
        daemon.engine.post(replace(configured, models=models))
        for model, pin in self._inheritance.pins.items():
            daemon.engine.post(PinRequested(model, pin))
        for model in self._inheritance.unloaded_by_operator:
            daemon.engine.post(UnloadRequested(model))

    def _with_override(self, daemon: Daemon, spec: ModelSpec) -> ModelSpec:
        """The specification with an operator's overrides, if they are still valid. Otherwise the worker is replaced."""
        values = self._inheritance.overrides.get(spec.id)
        if values is None:
            return spec
        learned, runtimes_dir = daemon.learned(), daemon.catalog.server.runtimes_dir
        try:
            model = overridden(daemon.catalog.models[spec.id], values, runtimes_dir=runtimes_dir)
            override = Override(model, values, model.spec(learned), spec)
        except InvalidRequestError as error:
            log.warning("upgrade.override_dropped", model=spec.id, reason=error.message)
            return spec
        daemon.fleet.override(spec.id, override)
        return override.spec

    async def report_serving(self, daemon: Daemon) -> None:
        """Report that we listen. Returns once the predecessor has released everything, or is dead."""
        try:
            await self._channel.send({"serving": True})
            await self._channel.receive()
        except ChannelClosedError:
            log.warning("upgrade.predecessor_gone", predecessor=self._channel.pid)
        for store in self.stores:
            await store.settle()
        for process in self._processes:
            process.send_line(b"adopt %d\n" % os.getpid())
        self._follow_task = asyncio.create_task(self._follow(daemon), name="predecessor")

    @property
    def running(self) -> int:
        """The number of the predecessor's requests that still run."""
        return len(self._running)

    async def _follow(self, daemon: Daemon) -> None:
        """Receive the ends of the predecessor's requests. At the end of its messages all of them have ended."""
        try:
            while True:
                content = (await self._channel.receive()).content
                ticket = foreign(self._channel.pid, content["finished"])
                if ticket in self._running:
                    self._running.remove(ticket)
                    daemon.engine.post(RequestFinished(ticket))
        except ChannelClosedError:
            for ticket in self._running:
                daemon.engine.post(RequestFinished(ticket))
            self._running.clear()
        self._channel.close()
        log.info("upgrade.predecessor_ended", predecessor=self._channel.pid)
