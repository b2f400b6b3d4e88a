"""Fetches workers' own metrics. A worker that doesn't answer in time has none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from supervisor.core.types import WorkerState
from supervisor.engine.status import ModelStatus
from supervisor.errors import LlmuxError

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

TIMEOUT_S: Final = 1.0
LIMIT: Final = 1024 * 1024


def ready_workers(daemon: Daemon) -> list[ModelStatus]:
    """All workers that are ready."""
    running = (worker for model in daemon.engine.active() for worker in model.replicas)
    return [worker for worker in running if worker.state is WorkerState.READY and worker.answering]


async def metrics_of(daemon: Daemon, worker: ModelStatus) -> bytes:
    """The worker's metrics in Prometheus's text format; empty if it has none or doesn't answer in time."""
    found = daemon.fleet.metrics_source(worker.id, worker.generation)
    if found is None:
        return b""
    upstream, path = found
    try:
        async with asyncio.timeout(TIMEOUT_S):
            response = await upstream.request("GET", path.encode(), [])
            try:
                return await response.read(LIMIT) if response.status == 200 else b""
            finally:
                response.close()
    except (TimeoutError, LlmuxError):
        return b""
