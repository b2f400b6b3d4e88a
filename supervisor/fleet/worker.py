"""A worker's lifecycle: one task runs it from its launch to its end, and reports to the engine by events.

place → start → probe until ready → watch → stop. In every case the task ends after the worker's whole process tree has exited
and its port and connections are released. Before a worker is ready, and with every probe after that, each socket that
listens on its port must belong to its own tree, so that no request goes to another program. An inconclusive probe is repeated.

The worker's launcher decides where and how its processes run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

import structlog
from msgspec import UNSET

from runtimes.base import LaunchSpec, ModelUnusableError, RuntimeNotInstalledError
from supervisor.catalog import CatalogModel
from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.core.events import WorkerReady, WorkerUnkillable, WorkerUnready
from supervisor.core.types import Crash, CrashClass, Devices, Parts, base_of
from supervisor.errors import LlmuxError
from supervisor.fleet.launcher import Launcher, Look, Started
from supervisor.fleet.replica import Post
from supervisor.fleet.steps import steps_of
from supervisor.host.memory.memory import HolderPids, WorkerKey
from supervisor.host.process.logs import CRASH_LINES, classify, tail
from supervisor.host.process.ports import Ownership
from supervisor.host.process.process import HOST_TROUBLE, SpawnError, UnkillableError
from supervisor.host.process.progress import Progress
from supervisor.host.process.threads import in_thread
from supervisor.host.upstream.probe import Liveness, Readiness, StartupPatience, check_inference, startup_delay_s
from supervisor.host.upstream.upstream import UpstreamPool
from supervisor.schema.model import WorkerFacts
from supervisor.schema.request import Step

log = structlog.get_logger("llmux.worker")

READINESS_TIMEOUT_S = 1.0  # or the interval, if that is shorter; likewise for liveness
LIVENESS_TIMEOUT_S = 5.0
LOOKS = 4  # polls of the steps, in the time in which a request may be silent
INFERENCE_INTERVALS = 3  # of liveness: a large model on a slow machine needs seconds for a token
LOG_TAIL_LINES = 20
ADOPTED_GRACE_S = 10.0  # of a worker whose model is no longer configured


class Worker:
    """The `Replica` that is a process on this machine. Create it in the event loop's thread."""

    def __init__(
        self,
        key: WorkerKey,
        model: CatalogModel | None,
        devices: Devices,
        launcher: Launcher,
        limits: LimitsConfig,
        post: Post,
        adopted: Started | None = None,
        *,
        parts_mib: Parts = (),
    ) -> None:
        """`adopted`: a ready worker that a predecessor started. Its model may no longer be configured."""
        assert model is not None or adopted is not None
        loop = asyncio.get_running_loop()
        self.upstream: UpstreamPool | None = None
        self.metrics: tuple[UpstreamPool, str] | None = None
        self.steps: tuple[UpstreamPool, str] | None = None
        self.progress: Progress | None = None  # of its start
        self._key = key
        self._model = model
        self._grace_s = model.config.grace_s if model is not None else ADOPTED_GRACE_S
        self._devices = devices
        self._parts_mib = parts_mib
        self._launcher = launcher
        self._limits = limits
        self._post = post
        self._log = launcher.log_path(key[0])
        self._port: int | None = None
        self._ready = False
        self._runs_elsewhere = False  # in a container: its process tree doesn't show its memory
        self._started_at = time.monotonic()
        self._stop_requested: asyncio.Future[None] = loop.create_future()
        self._force_requested: asyncio.Future[None] = loop.create_future()
        self._adopted = adopted
        if adopted is not None:
            self._port = adopted.spec.port
            self._started_at = adopted.started_at or self._started_at
            self._connect(adopted.spec)

    # ------------------------------------------------------------------------------------------------------ interface

    def stop(self, *, force: bool) -> None:
        for request in (self._stop_requested, self._force_requested) if force else (self._stop_requested,):
            if not request.done():
                request.set_result(None)

    def holder(self) -> HolderPids:
        pids = self._launcher.list().get(self._key)
        roots = () if pids is None or self._runs_elsewhere else (pids.shim_pid,)
        return HolderPids(self._devices, roots, loading=not self._ready)

    def facts(self) -> WorkerFacts:
        pids, model = self._launcher.list().get(self._key), self._model
        return WorkerFacts(
            pid=pids.pid if pids is not None else None,
            shim_pid=pids.shim_pid if pids is not None else None,
            port=self._port,
            upstream_model=model.adapter.upstream_model(model.config) if model and model.adapter.remote else UNSET,
            uptime_s=round(time.monotonic() - self._started_at, 3),
            connections=self.upstream.open_connections if self.upstream is not None else 0,
            log=str(self._log),
        )

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def run(self) -> Crash | None:
        started = self._adopted
        if started is None:
            assert self._model is not None
            try:
                context = self._launcher.place(self._key, self._devices, self._parts_mib)
                self._port = context.port
                started = await self._launcher.start(self._key, self._model, context)
            except (RuntimeNotInstalledError, ModelUnusableError, LlmuxError, OSError) as error:
                return _start_crash(error)
        try:
            return await self._supervise(started)
        finally:
            if self.upstream is not None:
                self.upstream.close()

    async def _supervise(self, started: Started) -> Crash | None:
        self._runs_elsewhere = started.spec.kill_argv is not None
        watched = asyncio.create_task(self._probe(started.spec))
        exit_watch = asyncio.create_task(self._watch_exit(started))
        try:
            await _wait_for_any(started.exited, watched, self._stop_requested)
        except asyncio.CancelledError:  # the worker belongs to a successor now
            watched.cancel()
            raise
        finally:
            exit_watch.cancel()
        if started.exited.done():
            await _cancel_and_wait(watched)
            self._mark_unready("it ended")
            end = started.exited.result()
            lines = await self._last_lines(CRASH_LINES)
            ended = classify(end.code, lines, oom_killed=end.oom_killed)
            hint = self._model.adapter.hint(ended.quote, started.spec.argv) if self._model is not None else ""
            return replace(ended, summary=ended.summary + hint, quote=ended.quote + hint) if hint else ended
        crash = None
        if watched.done():
            crash = self._crash_of_probe(watched)
            self._mark_unready(crash.operator_summary)
        else:
            await _cancel_and_wait(watched)
        self._ready = False
        # A worker that crashed or hangs gets no grace.
        await self._stop_process_tree(started, at_once=crash is not None and started.spec.stop_argv is None)
        if crash is None:
            return None
        return replace(crash, log_tail=await self._last_lines(LOG_TAIL_LINES))

    async def _last_lines(self, count: int) -> tuple[str, ...]:
        try:
            return await in_thread(lambda: tail(self._log, count))
        except OSError:
            return ()

    def _crash_of_probe(self, watched: asyncio.Task[Crash]) -> Crash:
        """The reason why the worker must be ended: after a bug in the probes, too, because it must not run unwatched."""
        error = watched.exception()
        if error is None:
            return watched.result()
        log.error("worker.unwatched", model=self._key[0], generation=self._key[1], exc_info=error)
        return Crash(CrashClass.UNKNOWN, f"it could not be watched any more: {error!r}")

    async def _watch_exit(self, started: Started) -> None:
        await started.main_ended.wait()
        self._mark_unready("it ended")

    def _mark_unready(self, reason: str) -> None:
        """Send no new requests to a worker that ended by itself, while the rest of its tree is killed."""
        if self._ready:
            self._ready = False
            self._post(WorkerUnready(*self._key, reason))

    async def _stop_process_tree(self, started: Started, *, at_once: bool) -> None:
        """Stop the worker and wait until its process tree has exited. A forced stop ends the grace."""
        grace_s = 0.0 if at_once or self._force_requested.done() else self._grace_s
        if grace_s > 0 and not started.exited.done():
            await self._launcher.stop(self._key, kill=False)
            await _wait_for_any(started.exited, self._force_requested, timeout_s=grace_s)
        reported = False
        while not started.exited.done():  # again with each forced stop
            self._force_requested = asyncio.get_running_loop().create_future()
            try:
                await self._launcher.stop(self._key, kill=True)
            except UnkillableError as error:
                if not reported:
                    self._post(WorkerUnkillable(*self._key, str(error)))
                reported = True
            await _wait_for_any(started.exited, self._force_requested)

    # ---------------------------------------------------------------------------------------------------------- probes

    async def _probe(self, spec: LaunchSpec) -> Crash:
        """Probe the worker until it is ready, report that, and go on probing. Returns the reason why it must be ended."""
        if self.upstream is None:
            crash = await self._wait_until_ready(spec)
            if crash is not None:
                return crash
            self._connect(spec)
            self._post(WorkerReady(*self._key))
        assert self.upstream is not None
        watches = [self._probe_health(spec, self.upstream)]
        if self._model is not None and self._model.config.probe == "inference":
            watches.append(self._probe_inference(spec, self.upstream))
        if self.steps is not None:
            watches.append(self._poll_steps(*self.steps))
        return await _first_result(watches)

    def _connect(self, spec: LaunchSpec) -> None:
        limits = self._limits
        self.upstream = UpstreamPool(
            spec.host,
            spec.port,
            spec.auth,
            connect_s=limits.connect_s,
            first_byte_s=limits.first_byte_s,
            stream_idle_s=limits.stream_idle_s,
            patience_s=spec.patience_s,
        )
        if spec.metrics is not None:
            self.metrics = (self.upstream, spec.metrics)
        if spec.progress is not None:
            self.steps = (self.upstream, spec.progress)
        self._ready = True

    async def _wait_until_ready(self, spec: LaunchSpec) -> Crash | None:
        assert self._model is not None
        config = self._model.config
        patience = StartupPatience(config.startup_timeout_s, config.startup_limit_s, self._started_at)
        while True:
            look = await self._launcher.probe(self._key, READINESS_TIMEOUT_S, starting=True)
            if look.ready:
                return None
            crash = _port_crash(spec, look)
            if crash is not None:
                return crash
            now = time.monotonic()
            self.progress = look.progress or self.progress
            reason = patience.observe(look.progress, now) if look.progress is not None else None
            if reason is not None:
                quote = f"{reason}; its health check says: {look.health.detail}"
                return Crash(CrashClass.START_TIMEOUT, f"{reason}; {_probe_result_text(spec, look)}", quote=quote)
            await asyncio.sleep(startup_delay_s(now - self._started_at, spec.health.interval_s))

    async def _probe_health(self, spec: LaunchSpec, upstream: UpstreamPool) -> Crash:
        limits, clock = self._limits, upstream.loop.time
        timeout_s = min(READINESS_TIMEOUT_S, limits.readiness_interval_s)
        long_timeout_s = min(LIVENESS_TIMEOUT_S, limits.liveness_interval_s)
        readiness, liveness = Readiness(), Liveness()
        looked = clock()
        while True:
            await asyncio.sleep(limits.readiness_interval_s)
            look = await self._launcher.probe(self._key, timeout_s)
            health = look.health
            if readiness.observe(health):
                self._post(WorkerReady(*self._key) if readiness.ready else WorkerUnready(*self._key, health.detail))
            crash = _port_crash(spec, look)
            if crash is not None:
                return crash
            if clock() - looked < limits.liveness_interval_s:
                continue
            if not health.ok:
                health = (await self._launcher.probe(self._key, long_timeout_s)).health
            flowed = upstream.last_byte_at > looked
            looked = clock()
            if liveness.observe(health, bytes_flowed=flowed):
                why = "its health check failed too often"
                return Crash(CrashClass.UNRESPONSIVE, why, quote=f"{why}: {health.detail}")

    async def _probe_inference(self, spec: LaunchSpec, upstream: UpstreamPool) -> Crash:
        """Send the model a small request while it is idle. Returns when it must be ended: it is healthy, but doesn't compute.

        A running request may keep the whole worker busy without a byte, for at most `first_byte_s`; after that the worker is probed.
        """
        assert self._model is not None
        smallest = self._model.adapter.smallest_request(self._model.config)
        assert smallest is not None, "the catalog checks that"
        path, request = smallest
        name = self._model.adapter.upstream_model(self._model.config) or base_of(self._key[0])
        body = json.dumps({"model": name, **request}).encode()
        limits, clock = self._limits, upstream.loop.time
        liveness = Liveness()
        free_at = clock()
        while True:
            looked = clock()
            await asyncio.sleep(limits.liveness_interval_s)
            if upstream.last_byte_at > looked:
                liveness = Liveness()
                continue
            if not upstream.is_busy:
                free_at = clock()
            elif clock() - max(free_at, upstream.last_byte_at) < limits.first_byte_s:
                continue
            timeout_s = INFERENCE_INTERVALS * limits.liveness_interval_s
            result = await check_inference((spec.host, spec.port), path, body, timeout_s, spec.auth)
            if liveness.observe(result, bytes_flowed=upstream.last_byte_at > looked):
                why = "it is healthy, and does not compute: its probe through inference failed too often"
                return Crash(CrashClass.UNRESPONSIVE, why, quote=f"{why}: {result.detail}")

    async def _poll_steps(self, upstream: UpstreamPool, path: str) -> Crash:
        """Poll the progress of its requests, which may take long without a byte: a worker with new steps isn't silent."""
        before: Mapping[str, Step] = {}
        while True:
            await asyncio.sleep(min(self._limits.first_byte_s, self._limits.stream_idle_s) / LOOKS)
            steps = await steps_of(upstream, path) if upstream.is_busy else {}
            if steps and steps != before:
                upstream.note_progress()
                before = steps


def _probe_result_text(spec: LaunchSpec, look: Look) -> str:
    """The result of a start's last probe, in words that clients may see."""
    if look.health.status is not None:
        return f"it answers {spec.health.path} with HTTP {look.health.status}"
    if look.elsewhere:
        ports = " and ".join(map(str, look.elsewhere))
        return f"it listens on port {ports} instead of the one that llmux gave it, {spec.port}"
    return f"nothing answers on its port, {spec.port}"


def _start_crash(error: Exception) -> Crash:
    match error:
        case RuntimeNotInstalledError():
            return Crash(CrashClass.NOT_INSTALLED, str(error))
        case ModelUnusableError():
            return Crash(CrashClass.UNUSABLE, str(error))
        case SpawnError():
            return Crash(error.kind, error.message)
        case LlmuxError():
            return Crash(CrashClass.PORT, error.message)
    is_host = isinstance(error, OSError) and error.errno in HOST_TROUBLE
    return Crash(CrashClass.HOST if is_host else CrashClass.UNKNOWN, f"can't be started now: {error}")


def _port_crash(spec: LaunchSpec, look: Look) -> Crash | None:
    """The crash if another process listens on the worker's port; else None."""
    if look.owner in (Ownership.SHARED, Ownership.FOREIGN):
        return Crash(CrashClass.PORT, f"port {spec.port}: {look.owner}")
    return None


async def _wait_for_any(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of the futures is done, or the timeout is over."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _first_result(watches: list[Coroutine[Any, Any, Crash]]) -> Crash:
    """The result of the first coroutine that returns; the others are cancelled."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        await _wait_for_any(*tasks)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            await _cancel_and_wait(task)


async def _cancel_and_wait(task: asyncio.Task[Crash]) -> None:
    """Cancel the task, wait for its end, and ignore its result."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
