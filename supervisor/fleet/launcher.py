"""The seam between a worker's life, which is the same everywhere, and the machine that runs its processes.

`LocalLauncher` starts them on this machine; another launcher may start them elsewhere. A worker is reached by the address in
its `LaunchSpec`; its launcher answers everything else about its processes, by model and generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtimes.base import LaunchContext, LaunchSpec
from supervisor.catalog import CatalogModel
from supervisor.core.types import Devices, ModelId, Parts
from supervisor.host.memory.memory import WorkerKey
from supervisor.host.process.ports import Ownership
from supervisor.host.process.process import ProcessExit
from supervisor.host.process.progress import Progress
from supervisor.host.upstream.probe import ProbeResult


@dataclass(frozen=True, slots=True)
class Started:
    """A worker whose program runs. Never cancel `exited`."""

    spec: LaunchSpec
    main_ended: asyncio.Event  # it answers no more; other processes of its tree may live
    exited: asyncio.Future[ProcessExit]  # done when the last process of its tree is gone
    started_at: float | None = None  # on the monotonic clock; None: just now


@dataclass(frozen=True, slots=True)
class Look:
    """The result of a probe."""

    health: ProbeResult
    owner: Ownership | None = None  # of its port; None: unknown now
    progress: Progress | None = None  # of a start; None: not looked at, or unknown now
    elsewhere: Sequence[int] = ()  # the ports that its processes listen on, of a start with nobody on its own

    @property
    def ready(self) -> bool:
        """Is the worker healthy, and is it the worker itself that answers?"""
        return self.health.ok and self.owner is Ownership.OURS


@dataclass(frozen=True, slots=True)
class Pids:
    """A worker's processes: `pid` is its program, `shim_pid` the root of the whole tree."""

    pid: int
    shim_pid: int


class Launcher(Protocol):
    """Runs workers. Use from the event loop's thread; what isn't a coroutine returns at once."""

    def place(self, worker: WorkerKey, devices: Devices, parts_mib: Parts) -> LaunchContext:
        """Reserve an address for a worker that may take so much of each device, until `start` fails or the worker is gone.

        Raises LlmuxError when no address is free.
        """

    async def start(self, worker: WorkerKey, model: CatalogModel, context: LaunchContext) -> Started:
        """Start the worker at its reserved address, as its runtime's adapter says. Returns once its program runs.

        Raises RuntimeNotInstalledError, ModelUnusableError, SpawnError, and OSError where a later try may succeed.
        """

    async def stop(self, worker: WorkerKey, *, kill: bool) -> None:
        """Ask the worker's process tree to end and return at once, or kill it and return when it is gone.

        Raises KeyError when it is gone already, and UnkillableError when a killed tree is still there after some seconds.
        """

    async def probe(self, worker: WorkerKey, timeout_s: float, *, starting: bool = False) -> Look:
        """Ask the worker for its health, and look which process listens on its port.

        While it is starting, also read its progress, once a second. Raises KeyError when it is gone.
        """

    def list(self) -> Mapping[WorkerKey, Pids]:
        """The workers that run now."""

    def log_path(self, model: ModelId) -> Path:
        """The log file of the model's workers."""
