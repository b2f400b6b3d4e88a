"""`GET /metrics`: what llmux counts and what its workers count, in Prometheus's text format.

Workers' own metrics are fetched at the same moment, all at once, and passed on with a `model` label. A worker that does
not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.scrape import metrics_of, ready_workers
from supervisor.daemon.slices import slices
from supervisor.dialects.listed import Pieces
from supervisor.errors import NotFoundError
from supervisor.http.worker_metrics import together

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAMES: Final = re.compile(r"^# TYPE (\S+)", re.MULTILINE)


def route(daemon: Daemon) -> Route:
    """`GET /metrics`."""

    async def answer(_request: Request) -> Response:
        if not daemon.catalog.server.metrics:
            raise NotFoundError("Metrics are switched off: server.metrics.")
        process = await daemon.metrics.own_process()
        own, taken = [process.encode()], set(_NAMES.findall(process))
        async for made in slices(daemon.metrics.lines()):
            own.append("".join(made).encode())
            taken.update(_NAMES.findall("".join([piece for piece in made if piece.startswith("#")])))
        await asyncio.sleep(0)
        ready = ready_workers(daemon)
        texts = await asyncio.gather(*(metrics_of(daemon, model) for model in ready))
        workers = together(zip((model.id for model in ready), texts, strict=True), taken)
        return Pieces([*own, workers], CONTENT_TYPE)

    return Route("/metrics", answer, methods=["GET"])
