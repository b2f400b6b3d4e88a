"""The runner's capabilities, and the use of its devices and its queue."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Final

from supervisor.core.types import WorkerState
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.health import trouble
from supervisor.daemon.observability.runner_metrics import known_estimate
from supervisor.daemon.observability.scrape import metrics_of, ready_workers
from supervisor.dialects.runner import types
from supervisor.dialects.runner.lifecycle import pull_progress, total
from supervisor.dialects.runner.models import context_of, memory_of, quantization_of
from supervisor.engine.status import ModelStatus
from supervisor.host.distribution import version
from supervisor.jobs.pulls import progress_of

FRESH_S: Final = 5.0
"""How long an answer is cached."""
_CACHE_USE: Final = re.compile(
    rb"^(?:vllm:kv_cache_usage_perc|llamacpp:kv_cache_usage_ratio)(?:\{[^}\n]*\})?[ \t]+([0-9.]+(?:e-?[0-9]+)?)\s*$",
    re.MULTILINE,
)
"""The workers' metrics of cache use: between 0 and 1."""


class RunnerApi:
    """The daemon, and its capabilities, cached for `FRESH_S`. Use only from the event loop's thread."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._cached: tuple[float, types.RunnerCapabilities] | None = None  # the time, and the capabilities

    async def capabilities(self) -> types.RunnerCapabilities:
        """The current capabilities, at most `FRESH_S` old."""
        clock = self.daemon.engine.clock
        if self._cached is None or clock() - self._cached[0] >= FRESH_S:
            await self.daemon.know_capabilities()
            used = await _cache_use(self.daemon)
            self._cached = clock(), _capabilities(self.daemon, used)
        return self._cached[1]


def _capabilities(daemon: Daemon, cache_used: float | None) -> types.RunnerCapabilities:
    server = daemon.catalog.server
    return types.RunnerCapabilities(
        runner_type=server.runner_type or f"llmux-{version()}",
        runner_id=server.runner_id or socket.gethostname(),
        models=_models(daemon),
        resources=_resources(daemon, cache_used),
        queue=_queue(daemon),
        capabilities=_abilities(daemon),
        health="healthy" if trouble(daemon) is None else "unhealthy",
    )


def _models(daemon: Daemon) -> types.RunnerModels:
    models = types.RunnerModels([], [], [])
    for status in daemon.engine.figures():
        if status.id not in daemon.catalog.models:
            continue
        if status.answering and (whole := daemon.engine.model(status.id)) is not None:
            models.loaded.append(_loaded_model(daemon, whole))
        elif (load := daemon.loads.current(status.id)) is not None:
            models.loading.append(types.RunnerLoading(status.id, load.progress, load.eta_s))
        elif (pull := daemon.pulls.current(status.id)) is not None:
            models.loading.append(types.RunnerLoading(status.id, pull_progress(pull), progress_of(pull).eta_s))
        elif status.state is not WorkerState.FAILED:
            models.available.append(status.id)
    return models


def _loaded_model(daemon: Daemon, status: ModelStatus) -> types.RunnerModel:
    model = daemon.fleet.effective(status.id)
    loaded_at = int(time.time() - status.since_s) if status.state is WorkerState.READY else None
    return types.RunnerModel(status.id, quantization_of(model), context_of(model), loaded_at, memory_of(status))


def _resources(daemon: Daemon, cache_used: float | None) -> types.RunnerResources:
    devices, busy = daemon.sampler.devices(), daemon.sampler.busy()
    gpus = [device for device in devices if device.kind.accelerates]
    shared = {device.id for device in gpus or devices}
    totals = [device.totals for device in daemon.engine.devices() if device.id in shared]
    total_mib = sum(each.total_mib for each in totals)
    free_mib = total(each.free_mib for each in totals)
    return types.RunnerResources(
        gpu_ids=[device.index for device in gpus if device.index is not None],
        gpu_memory_total_mb=total_mib,
        gpu_memory_used_mb=None if free_mib is None else max(0, total_mib - free_mib),
        gpu_memory_free_mb=free_mib,
        gpu_utilization=_mean([busy.get(gpu.id) for gpu in gpus]),
        kv_cache_size_mb=_cache_mib(daemon),
        kv_cache_utilization=cache_used,
    )


def _cache_mib(daemon: Daemon) -> int | None:
    """The cache size of all loaded models; None if any can't be computed."""
    loaded = [status for status in daemon.engine.active() if status.answering and not status.spec.remote]
    found = [(known_estimate(daemon, status), len(status.replicas)) for status in loaded]
    return total(None if estimate is None else estimate.cache_mib * workers for estimate, workers in found)


async def _cache_use(daemon: Daemon) -> float | None:
    """The used share of the workers' caches, from their metrics; None if no worker reports it."""
    texts = await asyncio.gather(*(metrics_of(daemon, worker) for worker in ready_workers(daemon)))
    shares = [float(share) for text in texts for share in _CACHE_USE.findall(text)]
    return _mean(shares)


def _mean(shares: Sequence[float | None]) -> float | None:
    """The mean; None if a value is unknown, or there are no values."""
    known = [share for share in shares if share is not None]
    return round(sum(known) / len(known), 3) if known and len(known) == len(shares) else None


def _queue(daemon: Daemon) -> types.RunnerQueue:
    queue, waits = daemon.engine.queue(), daemon.engine.waits()
    return types.RunnerQueue(queue.waiting, queue.most, waits.mean_ms, waits.p95_ms)


def _abilities(daemon: Daemon) -> types.RunnerAbilities:
    models = [daemon.fleet.effective(model) for model in daemon.catalog.models]
    known = [model.known_capabilities for model in models]
    caches = [model.adapter.prompt_cache(model.config) for model in models]
    return types.RunnerAbilities(
        streaming=True,
        prefix_caching=_any_known(None if cache is None else cache.is_kept for cache in caches),
        multi_tenant=daemon.catalog.server.multi_tenant,
        vision_input=_any_known(None if one is None else "image" in one.modalities for one in known),
        audio_input=_any_known(None if one is None else "audio" in one.modalities for one in known),
        function_calling=_any_known(None if one is None else one.tools for one in known),
    )


def _any_known(answers: Iterable[bool | None]) -> bool | None:
    """Whether any answer is true; None if none is true and at least one is unknown."""
    found = {*answers}
    return True if True in found else None if None in found else False
