"""Workers on this machine: each has a port of the configured range and a shim, and /proc shows its processes.

An error of the daemon itself (no descriptors left, no memory for a thread) doesn't count against a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import structlog

from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.device_kind import DeviceAssignment
from supervisor.catalog import CatalogModel
from supervisor.catalog.catalog import troubles_text
from supervisor.core.types import REMOTE, DeviceId, Devices, ModelId, Parts, base_of
from supervisor.fleet.launcher import Look, Pids, Started
from supervisor.host.environments.env_lease import EnvironmentRemovedError, EnvLease
from supervisor.host.environments.venvs import give_back
from supervisor.host.memory.memory import WorkerKey
from supervisor.host.process import leftover_containers
from supervisor.host.process.ports import Ownership, PortRange, exposed, listens_on, owner_check
from supervisor.host.process.process import ProcessExit, WorkerProcess
from supervisor.host.process.progress import read_progress
from supervisor.host.process.spawn import SpawnOrder, spawn
from supervisor.host.process.threads import in_thread
from supervisor.host.upstream.probe import check_health, check_ready

log = structlog.get_logger("llmux.worker")

T = TypeVar("T")

PROGRESS_INTERVAL_S = 1.0
KILL_WAIT_S = 5.0
LOG_LIMIT_BYTES = 16 * 1024 * 1024

# The variables that a worker inherits from the daemon: paths and GPUs, never a secret.
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|XDG_CACHE_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
    r"|XDG_RUNTIME_DIR|DOCKER_HOST|DOCKER_CONTEXT|CONTAINER_HOST|OMP_\w+|CUDA_\w+|NVIDIA_\w+|ROCR_\w+|HIP_\w+|GGML_\w+|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
)


@dataclass(slots=True)
class _Running:
    process: WorkerProcess
    spec: LaunchSpec
    exited: asyncio.Task[ProcessExit]
    looked: float  # time of the last reading of the progress


@dataclass(slots=True)
class LocalLauncher:
    """The `Launcher` for this machine. `instance` marks its processes."""

    ports: PortRange
    runtimes_dir: Path
    log_dir: Path
    instance: str
    devices: Mapping[DeviceId, DeviceAssignment]
    _workers: dict[WorkerKey, _Running] = field(default_factory=dict, init=False)

    def place(self, worker: WorkerKey, devices: Devices, parts_mib: Parts) -> LaunchContext:
        assigned = () if devices == REMOTE else tuple(self.devices[device] for device in devices)
        return LaunchContext(
            model=base_of(worker[0]),
            host=self.ports.host,
            port=self.ports.lease(worker),
            key=secrets.token_urlsafe(32),
            devices=assigned,
            runtimes_dir=self.runtimes_dir,
            parts_mib=parts_mib,
        )

    async def start(self, worker: WorkerKey, model: CatalogModel, context: LaunchContext) -> Started:
        environment = None
        try:
            spec, environment = await in_thread(lambda: _prepare_launch(model, context))
            order = self._spawn_order(worker, spec, environment)
            if spec.kill_argv is not None:
                await self._note_leftovers(worker, order, spec.kill_argv, context.key)
            process = await spawn(order)
        except BaseException:
            self._release(worker, environment)
            raise
        log.info("worker.spawned", model=worker[0], generation=worker[1], pid=process.pid, port=context.port)
        if process.unlogged:
            log.warning("worker.unlogged", model=worker[0], generation=worker[1], reason=process.unlogged)
        return self._supervise(worker, process, spec, environment)

    def adopt(self, worker: WorkerKey, process: WorkerProcess, spec: LaunchSpec) -> Started:
        """Supervise a worker that a predecessor started. `spec` needs no fields that only a start uses."""
        self.ports.adopt(worker, spec.port)
        log.info("worker.adopted", model=worker[0], generation=worker[1], pid=process.pid, port=spec.port)
        return self._supervise(worker, process, spec, None)

    def running(self) -> Mapping[WorkerKey, tuple[WorkerProcess, LaunchSpec]]:
        """The workers' processes and their specs, for a successor."""
        return {key: (running.process, running.spec) for key, running in self._workers.items()}

    def _supervise(
        self, worker: WorkerKey, process: WorkerProcess, spec: LaunchSpec, environment: EnvLease | None
    ) -> Started:
        exited = asyncio.create_task(self._clean_up_after_exit(worker, process, environment))
        self._workers[worker] = _Running(process, spec, exited, looked=time.monotonic())
        return Started(spec, process.main_ended, exited, process.started_at)

    async def stop(self, worker: WorkerKey, *, kill: bool) -> None:
        process = self._workers[worker].process
        if kill:
            await process.stop(0.0, KILL_WAIT_S)
        else:
            process.terminate()

    async def probe(self, worker: WorkerKey, timeout_s: float, *, starting: bool = False) -> Look:
        running = self._workers[worker]
        spec, health = running.spec, running.spec.health
        address = spec.host, spec.port
        if starting:
            answer = await check_ready(address, health.path, health.then, spec.auth, timeout_s)
        else:
            answer = await check_health(address, health.path, timeout_s)
        look = Look(answer)
        if spec.kill_argv is not None:  # it runs outside its process tree, so its listener is not in the tree
            look = replace(look, owner=Ownership.OURS)
        elif answer.ok or not starting:
            owner = await _read_facts(worker, lambda: owner_check(spec.port, _main_process_first(running.process)))
            look = replace(look, owner=owner)
        if starting and look.ready and spec.auth is None:
            await _warn_of_exposure(worker, spec.port)
        now = time.monotonic()
        if starting and not look.ready and now - running.looked >= PROGRESS_INTERVAL_S:
            running.looked = now
            log_file = self.log_path(worker[0])
            progress = await _read_facts(worker, lambda: read_progress((running.process.shim_pid,), log_file))
            look = replace(look, progress=progress)
            if answer.status is None:
                elsewhere = await _read_facts(worker, lambda: listens_on(_main_process_first(running.process)))
                look = replace(look, elsewhere=elsewhere or ())
        return look

    def list(self) -> Mapping[WorkerKey, Pids]:
        return {key: Pids(running.process.pid, running.process.shim_pid) for key, running in self._workers.items()}

    def log_path(self, model: ModelId) -> Path:
        """See `Launcher`. A name that is no valid file name gets a hash."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", model)[:100]
        if plain != model or plain.startswith("."):
            plain = f"{plain.lstrip('.')}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
        return self.log_dir / f"{plain}.log"

    def _spawn_order(self, worker: WorkerKey, spec: LaunchSpec, environment: EnvLease | None) -> SpawnOrder:
        env = {**inherited(), **spec.env}
        if spec.library_path:
            env["LD_LIBRARY_PATH"] = ":".join(filter(None, (*spec.library_path, env.get("LD_LIBRARY_PATH"))))
        model, generation = worker
        return SpawnOrder(
            instance=self.instance,
            model=model,
            generation=generation,
            argv=spec.argv,
            env=env,
            cwd=spec.cwd,
            log=self.log_path(model),
            log_limit=LOG_LIMIT_BYTES,
            stop_argv=spec.stop_argv,
            leftovers=self._leftovers_path(model) if spec.kill_argv is not None else None,
            keeps=(environment.record.fileno(),) if environment is not None else (),
        )

    async def _clean_up_after_exit(
        self, worker: WorkerKey, process: WorkerProcess, environment: EnvLease | None
    ) -> ProcessExit:
        end = await process.wait()
        await self._settle_leftovers(worker)
        del self._workers[worker]
        self._release(worker, environment)
        return end

    def _leftovers_path(self, model: ModelId) -> Path:
        return self.log_path(model).with_suffix(leftover_containers.SUFFIX)

    async def _note_leftovers(self, worker: WorkerKey, order: SpawnOrder, argv: tuple[str, ...], key: str) -> None:
        """Write a note of the worker's container, for its removal. Raises OSError."""
        await self._settle_leftovers(worker)  # of an earlier, interrupted start
        path, env = self._leftovers_path(worker[0]), {name: value for name, value in order.env.items() if value != key}
        await in_thread(lambda: leftover_containers.note(path, argv, env, order.cwd))

    async def _settle_leftovers(self, worker: WorkerKey) -> None:
        """Remove the worker's container, if it has left one."""
        path = self._leftovers_path(worker[0])
        if not path.exists():
            return
        try:
            trouble = await in_thread(lambda: leftover_containers.settle(path))
        except OSError as error:
            trouble = str(error)
        if trouble is not None:
            log.warning("worker.remains", model=worker[0], generation=worker[1], reason=trouble)

    def _release(self, worker: WorkerKey, environment: EnvLease | None) -> None:
        self.ports.release(worker)
        if environment is not None:
            give_back(environment)


def inherited() -> dict[str, str]:
    """The daemon's environment variables that a worker inherits. None is a secret."""
    return {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}


def _prepare_launch(model: CatalogModel, context: LaunchContext) -> tuple[LaunchSpec, EnvLease | None]:
    """The spec for starting the worker, with a lease on its environment. Tries again if that environment was just removed."""
    if troubles := model.find_troubles():
        raise ModelUnusableError(troubles_text(troubles))
    removed = None
    while True:
        spec = model.adapter.launch(model.config, context)
        if spec.argv[0] == removed:  # the command itself names the removed environment
            return spec, None
        try:
            return spec, EnvLease.on(spec.argv[0])
        except EnvironmentRemovedError:
            removed = spec.argv[0]


async def _read_facts(worker: WorkerKey, read: Callable[[], T]) -> T | None:
    """Read facts about a worker's processes in a thread; None if they can't be read now."""
    try:
        return await in_thread(read)
    except OSError as error:
        log.warning("worker.unseen", model=worker[0], generation=worker[1], reason=str(error))
        return None


async def _warn_of_exposure(worker: WorkerKey, port: int) -> None:
    """Warn of a worker without a key that other machines can reach, because its program listens on other addresses."""
    if addresses := await _read_facts(worker, lambda: exposed(port)):
        remedy = "let it listen on ${host} alone, or check a key (auth: bearer)"
        log.warning(
            "worker.exposed", model=worker[0], generation=worker[1], port=port, addresses=addresses, remedy=remedy
        )


def _main_process_first(process: WorkerProcess) -> Iterator[int]:
    """The pids of the tree: usually the main process listens, so the others are only listed if it doesn't."""
    yield process.pid
    yield from process.pids()
