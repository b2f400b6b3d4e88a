"""The interface between a worker's lifecycle, which is the same everywhere, and the machine that runs its processes.

`LocalLauncher` starts the processes on this machine; another launcher may start them elsewhere. A worker's address is in its
`LaunchSpec`; its launcher gives all other facts about its processes, by model and generation.
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
    main_ended: asyncio.Event  # the main process has ended; other processes of its tree may still run
    exited: asyncio.Future[ProcessExit]  # done when the last process of its tree has exited
    started_at: float | None = None  # on the monotonic clock; None: just now


@dataclass(frozen=True, slots=True)
class Look:
    """The result of a probe."""

    health: ProbeResult
    owner: Ownership | None = None  # of its port; None: unknown now
    progress: Progress | None = None  # of a start; None: not read, or unknown now
    elsewhere: Sequence[
        int
    ] = ()  # the ports of its listening processes, during a start, while its own port has no listener

    @property
    def ready(self) -> bool:
        """Is the answer healthy, and does it come from the worker itself?"""
        return self.health.ok and self.owner is Ownership.OURS


@dataclass(frozen=True, slots=True)
class Pids:
    """A worker's processes: `pid` is its program, `shim_pid` the root of the whole tree."""

    pid: int
    shim_pid: int


class Launcher(Protocol):
    """Runs workers. Use from the event loop's thread; functions that aren't coroutines return at once."""

    def place(self, worker: WorkerKey, devices: Devices, parts_mib: Parts) -> LaunchContext:
        """Reserve an address for a worker, until `start` fails or the worker has exited. `parts_mib`: its memory on each device.

        Raises LlmuxError when no address is free.
        """

    async def start(self, worker: WorkerKey, model: CatalogModel, context: LaunchContext) -> Started:
        """Start the worker at its reserved address, by the spec of its runtime's adapter. Returns once its program runs.

        Raises RuntimeNotInstalledError, ModelUnusableError, SpawnError, and OSError where a later try may succeed.
        """

    async def stop(self, worker: WorkerKey, *, kill: bool) -> None:
        """Terminate the worker's process tree and return at once, or kill the tree and return when it has exited.

        Raises KeyError if it has already exited, and UnkillableError if a killed tree still runs after some seconds.
        """

    async def probe(self, worker: WorkerKey, timeout_s: float, *, starting: bool = False) -> Look:
        """Request the worker's health, and find the process that listens on its port.

        While the worker is starting, also read its progress, once a second. Raises KeyError if it has exited.
        """

    def list(self) -> Mapping[WorkerKey, Pids]:
        """The workers that run now."""

    def log_path(self, model: ModelId) -> Path:
        """The log file of the model's workers."""
