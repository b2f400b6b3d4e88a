"""A worker's life: one task takes it from its launch to its end and tells the engine by events.

place → start → probe until ready → watch → stop. Whatever ends a worker, its task ends after its whole process tree is gone
and its port and connections are released. Before a worker is ready, and with every probe after that, each socket that
listens on its port must belong to its own tree, so that no request goes to a stranger. An inconclusive probe is repeated.

Its launcher decides where and how its processes run.
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
LOOKS = 4  # at the steps of a request, in the time that it may be silent
INFERENCE_INTERVALS = 3  # of liveness: a large model on a slow machine needs seconds for a token
LOG_TAIL_LINES = 20
ADOPTED_GRACE_S = 10.0  # of a worker whose model isn't configured any more


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
        """`adopted`: the worker runs and is ready, as a predecessor left it. Its model may not be configured any more."""
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
        self._runs_elsewhere = False  # what is in its own processes says nothing about its memory
        self._started_at = time.monotonic()
        self._stopped: asyncio.Future[None] = loop.create_future()
        self._forced: asyncio.Future[None] = loop.create_future()
        self._adopted = adopted
        if adopted is not None:
            self._port = adopted.spec.port
            self._started_at = adopted.started_at or self._started_at
            self._connect(adopted.spec)

    # --------------------------------------------------------------------------------------------------- from outside

    def stop(self, *, force: bool) -> None:
        for request in (self._stopped, self._forced) if force else (self._stopped,):
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

    # ----------------------------------------------------------------------------------------------------------- life

    async def run(self) -> Crash | None:
        started = self._adopted
        if started is None:
            assert self._model is not None
            try:
                context = self._launcher.place(self._key, self._devices, self._parts_mib)
                self._port = context.port
                started = await self._launcher.start(self._key, self._model, context)
            except (RuntimeNotInstalledError, ModelUnusableError, LlmuxError, OSError) as error:
                return _not_started(error)
        try:
            return await self._supervise(started)
        finally:
            if self.upstream is not None:
                self.upstream.close()

    async def _supervise(self, started: Started) -> Crash | None:
        self._runs_elsewhere = started.spec.kill_argv is not None
        watched = asyncio.create_task(self._watch(started.spec))
        exit_watch = asyncio.create_task(self._watch_exit(started))
        try:
            await _any(started.exited, watched, self._stopped)
        except asyncio.CancelledError:  # it is a successor's now
            watched.cancel()
            raise
        finally:
            exit_watch.cancel()
        if started.exited.done():
            await _cancel(watched)
            self._mark_unready("it ended")
            end = started.exited.result()
            lines = await self._last_lines(CRASH_LINES)
            ended = classify(end.code, lines, oom_killed=end.oom_killed)
            hint = self._model.adapter.hint(ended.quote, started.spec.argv) if self._model is not None else ""
            return replace(ended, summary=ended.summary + hint, quote=ended.quote + hint) if hint else ended
        crash = None
        if watched.done():
            crash = self._verdict(watched)
            self._mark_unready(crash.operator_summary)
        else:
            await _cancel(watched)
        self._ready = False
        # A worker that must be ended makes no use of its grace.
        await self._end(started, at_once=crash is not None and started.spec.stop_argv is None)
        if crash is None:
            return None
        return replace(crash, log_tail=await self._last_lines(LOG_TAIL_LINES))

    async def _last_lines(self, count: int) -> tuple[str, ...]:
        try:
            return await in_thread(lambda: tail(self._log, count))
        except OSError:
            return ()

    def _verdict(self, watched: asyncio.Task[Crash]) -> Crash:
        """Why the worker must be ended. After a bug of ours, too: it must not run on unwatched."""
        error = watched.exception()
        if error is None:
            return watched.result()
        log.error("worker.unwatched", model=self._key[0], generation=self._key[1], exc_info=error)
        return Crash(CrashClass.UNKNOWN, f"it could not be watched any more: {error!r}")

    async def _watch_exit(self, started: Started) -> None:
        await started.main_ended.wait()
        self._mark_unready("it ended")

    def _mark_unready(self, reason: str) -> None:
        """A worker that ends by itself gets no new requests while its remains are killed."""
        if self._ready:
            self._ready = False
            self._post(WorkerUnready(*self._key, reason))

    async def _end(self, started: Started, *, at_once: bool) -> None:
        """Stop the worker and wait until its process tree is gone. A forced stop cuts the grace short."""
        grace_s = 0.0 if at_once or self._forced.done() else self._grace_s
        if grace_s > 0 and not started.exited.done():
            await self._launcher.stop(self._key, kill=False)
            await _any(started.exited, self._forced, timeout_s=grace_s)
        reported = False
        while not started.exited.done():  # again with each forced stop
            self._forced = asyncio.get_running_loop().create_future()
            try:
                await self._launcher.stop(self._key, kill=True)
            except UnkillableError as error:
                if not reported:
                    self._post(WorkerUnkillable(*self._key, str(error)))
                reported = True
            await _any(started.exited, self._forced)

    # ---------------------------------------------------------------------------------------------------------- probes

    async def _watch(self, spec: LaunchSpec) -> Crash:
        """Probe the worker until it is ready, report that, and probe on. Returns the reason why it must be ended."""
        if self.upstream is None:
            crash = await self._until_ready(spec)
            if crash is not None:
                return crash
            self._connect(spec)
            self._post(WorkerReady(*self._key))
        assert self.upstream is not None
        watches = [self._while_ready(spec, self.upstream)]
        if self._model is not None and self._model.config.probe == "inference":
            watches.append(self._while_computing(spec, self.upstream))
        if self.steps is not None:
            watches.append(self._while_stepping(*self.steps))
        return await _first(watches)

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

    async def _until_ready(self, spec: LaunchSpec) -> Crash | None:
        assert self._model is not None
        config = self._model.config
        patience = StartupPatience(config.startup_timeout_s, config.startup_limit_s, self._started_at)
        while True:
            look = await self._launcher.probe(self._key, READINESS_TIMEOUT_S, starting=True)
            if look.ready:
                return None
            crash = _misplaced(spec, look)
            if crash is not None:
                return crash
            now = time.monotonic()
            self.progress = look.progress or self.progress
            reason = patience.observe(look.progress, now) if look.progress is not None else None
            if reason is not None:
                quote = f"{reason}; its health check says: {look.health.detail}"
                return Crash(CrashClass.START_TIMEOUT, f"{reason}; {_probe_result_text(spec, look)}", quote=quote)
            await asyncio.sleep(startup_delay_s(now - self._started_at, spec.health.interval_s))

    async def _while_ready(self, spec: LaunchSpec, upstream: UpstreamPool) -> Crash:
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
            crash = _misplaced(spec, look)
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

    async def _while_computing(self, spec: LaunchSpec, upstream: UpstreamPool) -> Crash:
        """Send the model a small request while it has no others. Returns when it must be ended: it is healthy and doesn't compute.

        A request under way may keep all of it busy, without a byte for as long as `first_byte_s`; after that it is suspect.
        """
        assert self._model is not None
        smallest = self._model.adapter.smallest_request(self._model.config)
        assert smallest is not None, "the catalog has checked that"
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

    async def _while_stepping(self, upstream: UpstreamPool, path: str) -> Crash:
        """Ask for the progress of its requests, which may take long without a byte: a worker that makes steps isn't silent."""
        before: Mapping[str, Step] = {}
        while True:
            await asyncio.sleep(min(self._limits.first_byte_s, self._limits.stream_idle_s) / LOOKS)
            steps = await steps_of(upstream, path) if upstream.is_busy else {}
            if steps and steps != before:
                upstream.works()
                before = steps


def _probe_result_text(spec: LaunchSpec, look: Look) -> str:
    """The result of a start's last probe, in words for everybody."""
    if look.health.status is not None:
        return f"it answers {spec.health.path} with HTTP {look.health.status}"
    if look.elsewhere:
        ports = " and ".join(map(str, look.elsewhere))
        return f"it listens on port {ports} instead of the one that llmux gave it, {spec.port}"
    return f"nothing answers on its port, {spec.port}"


def _not_started(error: Exception) -> Crash:
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


def _misplaced(spec: LaunchSpec, look: Look) -> Crash | None:
    """A crash if another process listens on its port."""
    if look.owner in (Ownership.SHARED, Ownership.FOREIGN):
        return Crash(CrashClass.PORT, f"port {spec.port}: {look.owner}")
    return None


async def _any(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of them is done, or the time is over."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _first(watches: list[Coroutine[Any, Any, Crash]]) -> Crash:
    """The result of the first that returns; the others are cancelled."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        await _any(*tasks)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            await _cancel(task)


async def _cancel(task: asyncio.Task[Crash]) -> None:
    """Cancel it and ignore its result."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
