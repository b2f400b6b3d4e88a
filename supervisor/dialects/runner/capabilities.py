"""`GET /v1/capabilities`: what this runner can do, and what its devices, models and queue are at."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Final

from pydantic import JsonValue

from supervisor.core.types import WorkerState
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.health import trouble
from supervisor.daemon.runner_metrics import known_estimate
from supervisor.daemon.scrape import metrics_of, ready_workers
from supervisor.dialects.runner.lifecycle import pull_progress
from supervisor.dialects.runner.models import context_of, memory_of, quantization_of
from supervisor.engine.status import ModelStatus
from supervisor.io.distribution import version

FRESH_S: Final = 5.0
"""For how long an answer is given again."""
_CACHE_USE: Final = re.compile(
    rb"^(?:vllm:kv_cache_usage_perc|llamacpp:kv_cache_usage_ratio)(?:\{[^}\n]*\})?[ \t]+([0-9.]+(?:e-?[0-9]+)?)\s*$",
    re.MULTILINE,
)
"""What workers call it: between 0 and 1."""

Json = dict[str, JsonValue]


class Descriptor:
    """The answer, made anew when it is older than `FRESH_S`. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._view: Json = {}
        self._made_at = float("-inf")

    async def view(self) -> Json:
        """As of now, or up to `FRESH_S` ago."""
        clock = self._daemon.engine.clock
        if clock() - self._made_at >= FRESH_S:
            await self._daemon.know_capabilities()
            used = await _cache_use(self._daemon)
            self._view, self._made_at = _described(self._daemon, used), clock()
        return self._view


def _described(daemon: Daemon, cache_used: float | None) -> Json:
    server = daemon.catalog.server
    return {
        "runnerType": server.runner_type or f"llmux-{version()}",
        "runnerId": server.runner_id or socket.gethostname(),
        "models": _models(daemon),
        "resources": _resources(daemon, cache_used),
        "queue": _queue(daemon),
        "capabilities": _abilities(daemon),
        "health": "healthy" if trouble(daemon) is None else "unhealthy",
    }


def _models(daemon: Daemon) -> Json:
    """Each model once: loaded, being loaded, or there to be loaded. One that has failed is in no list."""
    loaded: list[JsonValue] = []
    loading: list[JsonValue] = []
    available: list[JsonValue] = []
    for status in daemon.engine.figures():
        if status.id not in daemon.catalog.models:
            continue
        if status.answering and (whole := daemon.engine.model(status.id)) is not None:
            loaded.append(_loaded(daemon, whole))
        elif (load := daemon.loads.current(status.id)) is not None:
            loading.append({"id": status.id, "progress": load.progress, "eta": load.eta_s})
        elif (pull := daemon.pulls.current(status.id)) is not None:
            loading.append({"id": status.id, "progress": pull_progress(pull), "eta": pull.eta_s})
        elif status.state is not WorkerState.FAILED:
            available.append(status.id)
    return {"loaded": loaded, "loading": loading, "available": available}


def _loaded(daemon: Daemon, status: ModelStatus) -> Json:
    model = daemon.fleet.effective(status.id)
    return {
        "id": status.id,
        "quantization": quantization_of(model),
        "contextLength": context_of(model),
        "loadedAt": int(time.time() - status.since_s) if status.state is WorkerState.READY else None,
        "gpuMemoryMB": memory_of(status),
    }


def _resources(daemon: Daemon, cache_used: float | None) -> Json:
    """Of the GPUs together; where there are none, of the memory that stands for one."""
    devices, busy = daemon.sampler.devices(), daemon.sampler.busy()
    gpus = [device for device in devices if device.kind.accelerates]
    shared = {device.id for device in gpus or devices}
    totals = [device.totals for device in daemon.engine.devices() if device.id in shared]
    total = sum(each.total_mib for each in totals)
    free = _sum(each.free_mib for each in totals)
    return {
        "gpuIds": [device.index for device in gpus if device.index is not None],
        "gpuMemoryTotalMB": total,
        "gpuMemoryUsedMB": None if free is None else max(0, total - free),
        "gpuMemoryFreeMB": free,
        "gpuUtilization": _mean([busy.get(gpu.id) for gpu in gpus]),
        "kvCacheSizeMB": _cache_mib(daemon),
        "kvCacheUtilization": cache_used,
    }


def _cache_mib(daemon: Daemon) -> int | None:
    """Of all loaded models; None where that of one can't be computed."""
    loaded = [status for status in daemon.engine.active() if status.answering and not status.spec.remote]
    found = [(known_estimate(daemon, status), len(status.replicas)) for status in loaded]
    return _sum(None if estimate is None else estimate.cache_mib * workers for estimate, workers in found)


async def _cache_use(daemon: Daemon) -> float | None:
    """The share of their caches that workers say is used; None where none says so."""
    texts = await asyncio.gather(*(metrics_of(daemon, worker) for worker in ready_workers(daemon)))
    shares = [float(share) for text in texts for share in _CACHE_USE.findall(text)]
    return _mean(shares)


def _mean(shares: Sequence[float | None]) -> float | None:
    """None where one isn't known, or there is none."""
    known = [share for share in shares if share is not None]
    return round(sum(known) / len(known), 3) if known and len(known) == len(shares) else None


def _sum(parts: Iterable[int | None]) -> int | None:
    known = [*parts]
    return None if None in known else sum(part or 0 for part in known)


def _queue(daemon: Daemon) -> Json:
    found, waits = daemon.engine.queue(), daemon.engine.waits()
    return {
        "depth": found.waiting,
        "maxDepth": found.most,
        "avgWaitMs": waits.mean_ms,
        "p95WaitMs": waits.p95_ms,
    }


def _abilities(daemon: Daemon) -> Json:
    """What at least one model can do; null where none is known to, and it isn't known of all."""
    models = [daemon.fleet.effective(model) for model in daemon.catalog.models]
    known = [model.known_capabilities for model in models]
    caches = [model.adapter.prompt_cache(model.config) for model in models]
    return {
        "streaming": True,
        "prefixCaching": _any(None if cache is None else cache.is_kept for cache in caches),
        "multiTenant": daemon.catalog.server.multi_tenant,
        "visionInput": _any(None if one is None else "image" in one.modalities for one in known),
        "audioInput": _any(None if one is None else "audio" in one.modalities for one in known),
        "functionCalling": _any(None if one is None else one.tools for one in known),
    }


def _any(said: Iterable[bool | None]) -> bool | None:
    found = {*said}
    return True if True in found else None if None in found else False
