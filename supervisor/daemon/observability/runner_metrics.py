"""Metrics under the names that schedulers of model runners look for, beside llmux's own (`metrics`).

Such runners use the prefix `vllm_`, whatever the runtime; vLLM's own metrics have the prefix `vllm:`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runtimes.estimate import Estimate
from supervisor.daemon.observability import metric_table
from supervisor.engine.status import ModelStatus

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

MIB: Final = 1024 * 1024


class RunnerMetrics(Collector):
    """A daemon's metrics for model runners. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        daemon.metrics.requests.also(metric_table.RUNNER_REQUESTS, lambda counted: (counted[0], counted[1], counted[3]))
        daemon.metrics.queue_wait.also(metric_table.RUNNER_QUEUE_WAIT)
        daemon.metrics.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges that are read at each scrape, for the registry."""
        rate = metric_table.RUNNER_CACHE_HITS.gauge()
        for model, (prompt, cached) in self._daemon.metrics.cached.items():
            rate.add_metric([model], cached / prompt)
        depth = self._daemon.engine.queue().waiting
        queue = metric_table.RUNNER_QUEUE_DEPTH.gauge(depth)
        used = metric_table.RUNNER_GPU_MEMORY.gauge()
        gpus = {gpu.id: gpu.index for gpu in self._daemon.sampler.devices() if gpu.kind.accelerates}
        for device in self._daemon.engine.devices():
            free_mib = device.totals.free_mib
            if free_mib is not None and (index := gpus.get(device.id)) is not None:
                used.add_metric([str(index)], max(0, device.totals.total_mib - free_mib) * MIB)
        yield from (rate, queue, used, self._memory_by_part())

    def _memory_by_part(self) -> GaugeMetricFamily:
        """Memory of loaded models by part. Weights and cache of a worker are known only from the model's files."""
        family = metric_table.RUNNER_MODEL_MEMORY.gauge()
        for status in self._daemon.engine.active():
            estimate = known_estimate(self._daemon, status)
            if estimate is None:
                continue
            workers = len(status.replicas)
            reserved_mib = status.lease_mib if status.measured_mib is None else status.measured_mib
            weights, cache = estimate.weights_mib * workers, estimate.cache_mib * workers
            other = max(0, (reserved_mib or 0) - weights - cache)
            for part, mib in (("weights", weights), ("kv_cache", cache), ("other", other)):
                family.add_metric([status.id, part], mib * MIB)
        return family


def known_estimate(daemon: Daemon, status: ModelStatus) -> Estimate | None:
    """The computed footprint of a loaded model, if it lists the weights separately; else None."""
    if not status.answering or status.spec.remote or status.id not in daemon.catalog.models:
        return None
    estimate = daemon.fleet.effective(status.id).known_estimate
    return estimate if estimate is not None and estimate.weights_mib else None
