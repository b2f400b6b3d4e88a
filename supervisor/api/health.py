"""Operations for monitors, scrapers and browsers."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

from supervisor.api import openapi
from supervisor.api.metrics import exposition
from supervisor.api.operation import Api
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.health import trouble
from supervisor.errors import NotFoundError
from supervisor.gateway.operation import Group
from supervisor.schema.daemon import Alive, Document, Health, RunnerHealth
from supervisor.schema.operation import JSON, PLAIN, Example, Operation

GROUP: Final = Group("Health and metrics", "For monitors, Prometheus and browsers.")
GROUP.others += [
    Operation(
        "GET",
        "/",
        "`Ollama is running`, for programs; browsers get to the dashboard, at `/ui/`.",
        scope=None,
        answer_type=PLAIN,
        other_statuses=(307,),
        example=Example(answer="Ollama is running"),
    ),
    Operation("GET", "/ui", "Redirects to the dashboard, at `/ui/`.", scope=None, status=307),
    Operation(
        "GET",
        "/ui/{path}",
        "The dashboard's files.",
        scope=None,
        answer_type="*/*",
        other_statuses=(304,),
        errors=(404,),
        example=Example(path="/ui/"),
    ),
]


@GROUP.operation(
    "GET",
    "/health",
    scope=None,
    answer=Health | RunnerHealth,
    other_statuses=(503,),
    aliases=("/v1/health",),
)
async def read_health(api: Api) -> Response:
    """For load balancers and monitors: 200 while the daemon serves, 503 while it stops.

    With `health: runner` in the section `server` the answer is `{"status": "healthy", "uptime": 86400, "modelsLoaded": 2,
    "queueDepth": 3}`. It is also 503, `unhealthy` with a `reason`, when a model's last start ran out of memory (`gpu_oom`), all
    models have failed (`all_models_failed`), the queue is full (`queue_full`), or memory wasn't read yet (`starting`).
    """
    view = runner_health(api.daemon) if api.daemon.catalog.server.health == "runner" else _health_view(api)
    is_serving = view.status in {"ok", "healthy"}
    code = HTTPStatus.OK if is_serving else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(msgspec.json.encode(view), code, media_type=JSON)


def _health_view(api: Api) -> Health:
    engine = api.daemon.engine
    queue = engine.queue()
    return Health("stopping" if queue.is_stopping else "ok", [*engine.answering()], queue.waiting)


def runner_health(daemon: Daemon) -> RunnerHealth:
    """The health in the format of model runners."""
    found = trouble(daemon)
    return RunnerHealth(
        status="healthy" if found is None else "unhealthy",
        reason=msgspec.UNSET if found is None else found,
        uptime=int(time.monotonic() - daemon.started),
        models_loaded=len(daemon.engine.answering()),
        queue_depth=daemon.engine.queue().waiting,
    )


@GROUP.operation("GET", "/livez", scope=None)
async def read_liveness(api: Api) -> Alive:
    """200 while the process answers, whatever its models and queue do.

    For an orchestrator that restarts what is dead.
    """
    return Alive("ok")


@GROUP.operation(
    "GET",
    "/metrics",
    scope="metrics",
    answer_type=PLAIN,
    example=Example(answer='llmux_requests_total{model="Tiny-Instruct",status="200"} 1.0\n'),
)
async def read_metrics(api: Api) -> Response:
    """Metrics for Prometheus, in its text format."""
    if not api.daemon.catalog.server.metrics:
        raise NotFoundError("Metrics are switched off: server.metrics.")
    return await exposition(api.daemon)


@GROUP.operation(
    "GET",
    "/openapi.json",
    scope="inference",
    answer=Document,
    example=Example(
        answer={
            "openapi": "3.1.0",
            "info": {"title": "llmux"},
            "servers": [{"url": "/"}],
            "tags": [],
            "paths": {},
            "components": {},
        }
    ),
)
async def read_openapi(api: Api) -> Response:
    """What llmux serves, as an OpenAPI 3.1 document.

    It has all paths that a configuration may serve.
    """
    return Response(await asyncio.to_thread(openapi.encoded), media_type=JSON)
