"""A launcher without processes: it does what the test says, also wrongly, and remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from runtimes.base import LaunchContext, LaunchSpec
from supervisor.catalog import CatalogModel
from supervisor.core.types import Devices, ModelId, Parts
from supervisor.fleet.launcher import Look, Pids, Started
from supervisor.host.memory.memory import WorkerKey
from supervisor.host.process.ports import Ownership
from supervisor.host.process.process import ProcessExit
from supervisor.host.process.progress import Progress
from supervisor.host.upstream.probe import ProbeResult

HOST, PORT = "node-7", 7007
PIDS = Pids(pid=71, shim_pid=70)
OURS, STRANGE = Ownership.OURS, Ownership.FOREIGN
KILLED = ProcessExit(-9, killed=True)


def look(ok: bool = True, owner: Ownership | None = OURS, progress: Progress | None = None) -> Look:
    return Look(ProbeResult(ok, 200 if ok else 503, "HTTP 200" if ok else "HTTP 503", 0.0), owner, progress)


class ScriptedLauncher:
    """On node-7. Every probe sees `look`; an exception in its place is raised, as `refuse_place` and `refuse_start` are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.look: Look | Exception = look(ok=False)
        self.refuse_place: Exception | None = None
        self.refuse_start: Exception | None = None
        self.refuse_kill: Exception | None = None
        self.ignores_stop = False
        self.stop_argv: tuple[str, ...] | None = None
        self.kill_argv: tuple[str, ...] | None = None
        self.progress: str | None = None
        self.told: list[str] = []
        self.probes = 0
        self.held: set[WorkerKey] = set()
        self._running: dict[WorkerKey, Started] = {}

    def place(self, worker: WorkerKey, devices: Devices, parts_mib: Parts) -> LaunchContext:
        self.told.append("place")
        if self.refuse_place is not None:
            raise self.refuse_place
        self.held.add(worker)
        return LaunchContext(worker[0], HOST, PORT, "secret", (), self.folder)

    async def start(self, worker: WorkerKey, model: CatalogModel, context: LaunchContext) -> Started:
        self.told.append("start")
        if self.refuse_start is not None:
            self.held.remove(worker)
            raise self.refuse_start
        spec = LaunchSpec(
            ("program",),
            host=context.host,
            port=context.port,
            stop_argv=self.stop_argv,
            kill_argv=self.kill_argv,
            progress=self.progress,
        )
        started = Started(spec, asyncio.Event(), asyncio.get_running_loop().create_future())
        self._running[worker] = started
        return started

    async def stop(self, worker: WorkerKey, *, kill: bool) -> None:
        self.told.append("kill" if kill else "ask")
        assert worker in self.list()
        if kill and self.refuse_kill is not None:
            raise self.refuse_kill
        if kill or not self.ignores_stop:
            self.end(worker, KILLED if kill else ProcessExit(0))

    async def probe(self, worker: WorkerKey, timeout_s: float, *, starting: bool = False) -> Look:
        assert worker in self.list()
        self.probes += 1
        if isinstance(self.look, Exception):
            raise self.look
        return self.look

    def list(self) -> Mapping[WorkerKey, Pids]:
        return dict.fromkeys(self._running, PIDS)

    def log_path(self, model: ModelId) -> Path:
        return self.folder / f"{model}.log"

    def end_leader(self, worker: WorkerKey) -> None:
        """Its program has ended; something of its tree is still there."""
        self._running[worker].main_ended.set()

    def end(self, worker: WorkerKey, end: ProcessExit) -> None:
        """Nothing of it is left."""
        started = self._running.pop(worker)
        self.held.remove(worker)
        started.main_ended.set()
        started.exited.set_result(end)
