"""`GET /metrics`: what llmux counts and what its workers count, in Prometheus's text format.

Workers' own metrics are fetched at the same moment, all at once, and passed on with a `model` label. A worker that does
not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.core.types import Generation, ModelId, WorkerState
from supervisor.daemon.daemon import Daemon
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.http.worker_metrics import together

WORKER_TIMEOUT_S: Final = 1.0
WORKER_LIMIT: Final = 1024 * 1024
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAMES: Final = re.compile(r"^# TYPE (\S+)", re.MULTILINE)


def route(daemon: Daemon) -> Route:
    """`GET /metrics`."""

    async def answer(_request: Request) -> Response:
        if not daemon.catalog.server.metrics:
            raise NotFoundError("Metrics are switched off: server.metrics.")
        own = generate_latest(daemon.metrics.registry)
        taken = set(_NAMES.findall(own.decode()))
        running = (worker for model in daemon.engine.models() for worker in model.replicas)
        ready = [worker for worker in running if worker.state is WorkerState.READY and worker.answering]
        texts = await asyncio.gather(*(_worker(daemon, model.id, model.generation) for model in ready))
        workers = together(zip((model.id for model in ready), texts, strict=True), taken)
        return Response(own + workers, media_type=CONTENT_TYPE)

    return Route("/metrics", answer, methods=["GET"])


async def _worker(daemon: Daemon, model: ModelId, generation: Generation) -> bytes:
    """The worker's own metrics; nothing where it has none or doesn't answer in time."""
    found = daemon.fleet.metrics_source(model, generation)
    if found is None:
        return b""
    upstream, path = found
    try:
        async with asyncio.timeout(WORKER_TIMEOUT_S):
            response = await upstream.request("GET", path.encode(), [])
            try:
                return await response.read(WORKER_LIMIT) if response.status == 200 else b""
            finally:
                response.close()
    except (TimeoutError, LlmuxError):
        return b""
