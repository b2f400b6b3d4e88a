"""The running workers: one task per worker takes it from its launch order to its end and tells the engine by events.

launch → spawn → poll until ready → watch → stop. Whatever ends a worker, its task ends with exactly one WorkerExited, after
its whole process tree is gone and its port and connections are given back. Before a worker is called ready, and with
every probe after that, each socket that listens on its port must belong to its own tree: requests go neither to an
impostor nor to a stranger who shares the port.

Trouble of our own (no descriptors left, no memory for a thread) says nothing about a worker: it is looked at again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import JsonValue

from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from supervisor.catalog import CatalogModel
from supervisor.catalog.sections import LimitsConfig
from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    Devices,
    Event,
    Generation,
    ModelId,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.errors import LlmuxError
from supervisor.io.env_lease import EnvironmentGoneError, EnvLease
from supervisor.io.logs import TELLING_LINES, classify, tail
from supervisor.io.memory import HolderPids
from supervisor.io.ports import PortOwnership, PortRange, owner_check
from supervisor.io.probe import (
    Liveness,
    Readiness,
    StartupPatience,
    check_health,
    check_ready,
    read_progress,
    startup_delay_s,
)
from supervisor.io.process import ProcessExit, SpawnError, UnkillableError, WorkerProcess
from supervisor.io.spawn import SpawnOrder, spawn
from supervisor.io.upstream import UpstreamPool
from supervisor.io.venvs import give_back

log = structlog.get_logger("llmux.worker")

READINESS_TIMEOUT_S = 1.0  # or the interval, where that is shorter; so is it with liveness
LIVENESS_TIMEOUT_S = 5.0
PROGRESS_INTERVAL_S = 1.0
KILL_WAIT_S = 5.0
LOG_LIMIT_BYTES = 16 * 1024 * 1024
LOG_TAIL_LINES = 20

# What a worker may know of our environment: where things are and which GPUs there are, never a secret.
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|XDG_CACHE_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
    r"|OMP_\w+|CUDA_\w+|NVIDIA_\w+|ROCR_\w+|HIP_\w+|GGML_\w+|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
)

Key = tuple[ModelId, Generation]
Post = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers share."""

    ports: PortRange
    runtimes_dir: Path
    log_dir: Path
    instance: str
    devices: Mapping[DeviceId, DeviceAssignment]


class Worker:
    """One worker's life. `run()` once; `stop()` at any time."""

    def __init__(
        self,
        key: Key,
        model: CatalogModel,
        devices: Devices,
        surroundings: Surroundings,
        limits: LimitsConfig,
        post: Post,
    ) -> None:
        self.post = post
        self.upstream: UpstreamPool | None = None
        self.metrics: tuple[UpstreamPool, str] | None = None
        self._key = key
        self._model = model
        self._devices = devices
        self._around = surroundings
        self._limits = limits
        self._log = log_path(surroundings.log_dir, key[0])
        self._process: WorkerProcess | None = None
        self._port: int | None = None
        self._environment: EnvLease | None = None
        self._ready = False
        self._started = time.monotonic()
        self._stop_asked = asyncio.Event()
        self._force = False

    # --------------------------------------------------------------------------------------------------- from outside

    def stop(self, *, force: bool) -> None:
        """Begin to stop; `force` skips the grace, also of a stop that is under way."""
        self._force = self._force or force
        self._stop_asked.set()
        if force and self._process is not None:
            self._process.kill()

    def holder(self) -> HolderPids:
        """Its processes, for the memory sampler."""
        roots = (self._process.shim_pid,) if self._process is not None else ()
        return HolderPids(self._devices, roots, loading=not self._ready)

    def facts(self) -> dict[str, JsonValue]:
        """For the admin API."""
        process = self._process
        return {
            "pid": process.pid if process is not None else None,
            "shim_pid": process.shim_pid if process is not None else None,
            "port": self._port,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "connections": self.upstream.open_connections if self.upstream is not None else 0,
            "log": str(self._log),
        }

    # ----------------------------------------------------------------------------------------------------------- life

    async def run(self) -> Crash | None:
        """From launch to end. None: it was stopped; a Crash: it ended, or had to be ended, without being asked to."""
        model, generation = self._key
        holder = f"{model}:{generation}"
        try:
            self._port = self._around.ports.lease(holder)
            launch = await asyncio.to_thread(self._prepare, self._port)
            process = await spawn(self._order(launch))
        except RuntimeNotInstalledError as error:
            return Crash(CrashClass.NOT_INSTALLED, str(error))
        except ModelUnusableError as error:
            return Crash(CrashClass.BAD_ARGUMENTS, str(error))
        except SpawnError as error:
            # What the kernel refused *us* (descriptors, memory) or did too slowly may work a moment later.
            kind = CrashClass.BAD_ARGUMENTS if error.__cause__ is None else CrashClass.UNKNOWN
            return Crash(kind, error.message)
        except LlmuxError as error:
            return Crash(CrashClass.PORT, error.message)
        except OSError as error:
            return Crash(CrashClass.UNKNOWN, f"can't be started now: {error}")
        else:
            self._process = process
            log.info("worker.spawned", model=model, generation=generation, pid=process.pid, port=self._port)
            return await self._accompany(process, launch)
        finally:
            if self.upstream is not None:
                self.upstream.close()
            if self._port is not None:
                self._around.ports.release(holder)
            if self._environment is not None:
                give_back(self._environment)

    async def _accompany(self, process: WorkerProcess, launch: LaunchSpec) -> Crash | None:
        exited = asyncio.create_task(process.wait())
        watched = asyncio.create_task(self._watch(process, launch))
        stopped = asyncio.create_task(self._stop_asked.wait())
        mourned = asyncio.create_task(self._mourn(process))
        await asyncio.wait({exited, watched, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        mourned.cancel()
        if exited.done():
            await _cancel(watched)
            self._retract("it ended")
            return await asyncio.to_thread(self._classify, exited.result())
        crash = None
        if watched.done():
            crash = self._verdict(watched)
            self._retract(crash.summary)
        else:
            await _cancel(watched)
        self._ready = False
        await self._end(process, at_once=crash is not None and launch.stop_argv is None)
        await exited
        if crash is None:
            return None
        lines = await asyncio.to_thread(tail, self._log, LOG_TAIL_LINES)
        return Crash(crash.kind, crash.summary, tuple(lines), crash.exit_code)

    def _verdict(self, watched: asyncio.Task[Crash]) -> Crash:
        """Why it has to be ended. A mistake of ours in watching it must not leave it running unwatched."""
        error = watched.exception()
        if error is None:
            return watched.result()
        log.error("worker.unwatched", model=self._key[0], generation=self._key[1], exc_info=error)
        return Crash(CrashClass.UNKNOWN, f"it could not be watched any more: {error!r}")

    async def _mourn(self, process: WorkerProcess) -> None:
        await process.leader_ended.wait()
        self._retract("it ended")

    def _retract(self, reason: str) -> None:
        """Nothing new goes to a worker that is ending by itself, while its remains are cleared away."""
        if self._ready:
            self._ready = False
            self.post(WorkerUnready(*self._key, reason))

    async def _end(self, process: WorkerProcess, *, at_once: bool) -> None:
        """Until the tree is gone, however long that takes. `at_once`: it would not make use of its grace."""
        grace_s = 0.0 if self._force or at_once else self._model.config.grace_s
        try:
            await process.stop(grace_s, KILL_WAIT_S)
        except UnkillableError as error:
            self.post(WorkerUnkillable(*self._key, str(error)))
            await process.wait()

    def _prepare(self, port: int) -> LaunchSpec:
        """How to start it, from an environment that stays. Where it was removed meanwhile there is another, or none."""
        gone = None
        while True:
            launch = self._launch(port)
            if launch.argv[0] == gone:  # a command that names it itself
                return launch
            try:
                self._environment = EnvLease.on(launch.argv[0])
            except EnvironmentGoneError:
                gone = launch.argv[0]
            else:
                return launch

    def _launch(self, port: int) -> LaunchSpec:
        context = LaunchContext(
            model=self._key[0],
            host=self._around.ports.host,
            port=port,
            key=secrets.token_urlsafe(32),
            devices=tuple(self._around.devices[device] for device in self._devices),
            runtimes_dir=self._around.runtimes_dir,
        )
        return self._model.adapter.launch(self._model.config, context)

    def _order(self, launch: LaunchSpec) -> SpawnOrder:
        env = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
        env.update(launch.env)
        if launch.library_path:
            env["LD_LIBRARY_PATH"] = ":".join(filter(None, (*launch.library_path, env.get("LD_LIBRARY_PATH"))))
        return SpawnOrder(
            instance=self._around.instance,
            model=self._key[0],
            generation=self._key[1],
            argv=launch.argv,
            env=env,
            cwd=launch.cwd,
            log=self._log,
            log_limit=LOG_LIMIT_BYTES,
            stop_argv=launch.stop_argv,
            keeps=(self._environment.fd,) if self._environment is not None else (),
        )

    def _classify(self, end: ProcessExit) -> Crash:
        return classify(end.code, tail(self._log, TELLING_LINES), oom_killed=end.oom_killed)

    # ---------------------------------------------------------------------------------------------------------- probes

    async def _watch(self, process: WorkerProcess, launch: LaunchSpec) -> Crash:
        """Poll it until it is ready, say so, and go on. Returns why it has to be ended."""
        crash = await self._until_ready(process, launch)
        if crash is not None:
            return crash
        limits = self._limits
        self.upstream = UpstreamPool(
            launch.host,
            launch.port,
            launch.auth,
            connect_s=limits.connect_s,
            first_byte_s=limits.first_byte_s,
            stream_idle_s=limits.stream_idle_s,
        )
        if launch.metrics is not None:
            self.metrics = (self.upstream, launch.metrics)
        self._ready = True
        self.post(WorkerReady(*self._key))
        return await self._while_ready(process, launch, self.upstream)

    async def _until_ready(self, process: WorkerProcess, launch: LaunchSpec) -> Crash | None:
        config = self._model.config
        patience = StartupPatience(config.startup_timeout_s, config.startup_limit_s, self._started)
        looked = self._started
        health = launch.health
        base = f"http://{launch.host}:{launch.port}"
        while True:
            probe = await check_ready(base, health.path, health.then, launch.auth, READINESS_TIMEOUT_S)
            owner = await self._owner(process, launch) if probe.ok else None
            if owner is not None and owner.ok:
                return None
            if owner is not None and owner.foreign:
                return _misplaced(launch, owner)
            now = time.monotonic()
            if now - looked >= PROGRESS_INTERVAL_S:
                looked = now
                reason = await self._impatience(process, patience, now)
                if reason is not None:
                    return Crash(CrashClass.START_TIMEOUT, f"{reason}; its health check says: {probe.detail}")
            await asyncio.sleep(startup_delay_s(now - self._started, health.interval_s))

    async def _impatience(self, process: WorkerProcess, patience: StartupPatience, now: float) -> str | None:
        try:
            progress = await asyncio.to_thread(read_progress, (process.shim_pid,), self._log)
        except OSError as error:
            log.warning("worker.unseen", model=self._key[0], generation=self._key[1], reason=str(error))
            return None
        return patience.observe(progress, now)

    async def _while_ready(self, process: WorkerProcess, launch: LaunchSpec, upstream: UpstreamPool) -> Crash:
        base = f"http://{launch.host}:{launch.port}"
        limits, clock = self._limits, upstream.loop.time
        timeout_s = min(READINESS_TIMEOUT_S, limits.readiness_interval_s)
        long_timeout_s = min(LIVENESS_TIMEOUT_S, limits.liveness_interval_s)
        readiness, liveness = Readiness(), Liveness()
        looked = clock()
        while True:
            await asyncio.sleep(limits.readiness_interval_s)
            probe = await check_health(base, launch.health.path, {}, timeout_s)
            if readiness.observe(probe):
                event = WorkerReady(*self._key) if readiness.ready else WorkerUnready(*self._key, probe.detail)
                self.post(event)
            owner = await self._owner(process, launch)
            if owner is not None and owner.foreign:
                return _misplaced(launch, owner)
            if clock() - looked < limits.liveness_interval_s:
                continue
            if not probe.ok:
                probe = await check_health(base, launch.health.path, {}, long_timeout_s)
            flowed = upstream.last_byte_at > looked
            looked = clock()
            if liveness.observe(probe, bytes_flowed=flowed):
                return Crash(CrashClass.UNRESPONSIVE, f"its health check failed too often: {probe.detail}")

    async def _owner(self, process: WorkerProcess, launch: LaunchSpec) -> PortOwnership | None:
        """Who listens on its port; None when that can't be told now."""
        try:
            return await asyncio.to_thread(lambda: owner_check(launch.port, _leader_first(process)))
        except OSError as error:
            log.warning("worker.unseen", model=self._key[0], generation=self._key[1], reason=str(error))
            return None


def _leader_first(process: WorkerProcess) -> Iterator[int]:
    """Usually it is the leader that listens; only where it doesn't is the whole tree looked for."""
    yield process.pid
    yield from process.pids()


def _misplaced(launch: LaunchSpec, owner: PortOwnership) -> Crash:
    return Crash(CrashClass.PORT, f"port {launch.port}: {owner.detail}")


def log_path(log_dir: Path, model: ModelId) -> Path:
    """The model's log file; a name that could not be a file name as it is gets a fingerprint."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", model)[:100]
    if plain != model or plain.startswith("."):
        plain = f"{plain.lstrip('.')}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
    return log_dir / f"{plain}.log"


async def _cancel(task: asyncio.Task[Crash]) -> None:
    task.cancel()
    await asyncio.wait({task})
