"""The admin API: models and what is done to them, memory, decisions, requests in flight, history."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.core.events import PinAsked
from supervisor.core.types import ModelId
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.handover import Handover
from supervisor.daemon.health import health_view, trouble
from supervisor.daemon.queue_view import queue_view
from supervisor.daemon.reload import Reloader
from supervisor.daemon.request_views import ended_views, request_view
from supervisor.daemon.task_views import task_view, task_views
from supervisor.daemon.views import decision_view, device_views, memory_views, model_view
from supervisor.dialects.listed import listed
from supervisor.errors import InvalidRequestError, NotFoundError, UnavailableError
from supervisor.gateway.body.parameters import flag, json_object, number
from supervisor.gateway.record import ENDED
from supervisor.gateway.request import Request as GatewayRequest
from supervisor.http.answer import answer
from supervisor.io.distribution import version

MAX_DECISIONS = 1000
UPGRADE = "/v1/admin/upgrade"


def routes(daemon: Daemon, reloader: Reloader, handover: Handover | None = None) -> list[Route]:
    """What is below `/v1/admin` and answers at once, or when a load or unload is done."""

    def physical(request: Request) -> ModelId:
        return daemon.catalog.resolve(request.path_params["name"]).model.id

    async def models(_request: Request) -> Response:
        await daemon.know_capabilities()
        # Each model is told of as it is in one moment, and a later one in a later moment.
        views = (model_view(daemon, model) for model in daemon.catalog.models)
        return await listed((view for view in views if view is not None), object="list")

    async def view(name: ModelId) -> Response:
        await daemon.know_capabilities()
        return JSONResponse(model_view(daemon, name))

    async def model(request: Request) -> Response:
        return await view(physical(request))

    async def load(request: Request) -> Response:
        name = physical(request)
        overrides = (await json_object(request, ("overrides",))).get("overrides")
        if overrides is not None and not isinstance(overrides, dict):
            raise InvalidRequestError('"overrides" must be an object of keys and values.', param="overrides")
        await loading.load(daemon, name, overrides, request.path_params["name"])
        return await view(name)

    async def unload(request: Request) -> Response:
        name = physical(request)
        await loading.unload(daemon, name, request.path_params["name"], force=flag(request, "force"))
        return await view(name)

    async def loads(_request: Request) -> Response:
        return JSONResponse(daemon.loads.views())

    async def one_load(request: Request) -> Response:
        return JSONResponse(daemon.loads.view(request.path_params["id"]))

    async def cancel_load(request: Request) -> Response:
        return JSONResponse(daemon.loads.cancel(request.path_params["id"]))

    async def pin(request: Request) -> Response:
        name = physical(request)
        wanted = (await json_object(request, ("pin",))).get("pin")
        if not isinstance(wanted, bool):
            raise InvalidRequestError('The body must be {"pin": true} or {"pin": false}.', param="pin")
        daemon.engine.post(PinAsked(name, wanted))
        return await view(name)

    async def reload(request: Request) -> Response:
        body = await json_object(request, ("dry_run", "force"))

        def wanted(name: str) -> bool:
            value = body.get(name, False)
            if not isinstance(value, bool):
                raise InvalidRequestError(f'"{name}" must be true or false.', param=name)
            return value or flag(request, name)

        dry_run, force = wanted("dry_run"), wanted("force")
        difference = await (reloader.preview(force=force) if dry_run else reloader.reload("asked by API", force=force))
        return JSONResponse(difference.view())

    async def upgrade(_request: Request) -> Response:
        if handover is None:
            raise UnavailableError("This daemon can't be upgraded while it runs.", code="upgrade_failed")
        return JSONResponse(await handover.upgrade())

    async def gpu_memory(_request: Request) -> Response:
        # The devices are those of the first moment; a model that loads meanwhile may hold what they have as free.
        return await listed(memory_views(daemon), "models", devices=device_views(daemon))

    async def decisions(request: Request) -> Response:
        engine = daemon.engine
        name = request.query_params.get("model")
        about = _about(daemon, name) if name is not None else None
        limit = number(request, "limit", 100, MAX_DECISIONS)
        if "after" in request.query_params:
            newer = engine.decisions_since(number(request, "after", 0, sys.maxsize, least=0))
            kept = [decision for decision in newer if about in {None, decision.model}][:limit]
        else:
            kept = engine.decisions(about, limit=limit)
        return await listed((decision_view(daemon, decision) for decision in kept), object="list")

    async def tasks(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": task_views(daemon)})

    async def task(request: Request) -> Response:
        return JSONResponse(task_view(daemon, request.path_params["name"]))

    async def requests(_request: Request) -> Response:
        await daemon.steps.look(daemon.requests.running())
        await asyncio.sleep(0)
        return await listed(daemon.requests.views(), object="list")

    async def ended(request: Request) -> Response:
        asked = request.query_params
        limit = number(request, "limit", 100, ENDED)
        failed = flag(request, "failed") if "failed" in asked else None
        only = {name: asked.get(name) for name in ("model", "key", "tenant")}
        return JSONResponse(ended_views(daemon, limit=limit, failed=failed, **only))

    async def one_request(request: Request) -> Response:
        wanted = request.path_params["id"]
        if isinstance(found := daemon.requests.find(wanted), GatewayRequest):
            await daemon.steps.look([found])
        return JSONResponse(request_view(daemon, wanted))

    async def body(request: Request) -> Response:
        if daemon.body_log is None:
            raise NotFoundError("No bodies are kept here.", code="body_not_found")
        return answer(await daemon.body_log.find(request.path_params["id"]))

    async def queue(_request: Request) -> Response:
        return JSONResponse(queue_view(daemon))

    async def cancel(request: Request) -> Response:
        number_ = request.path_params["id"]
        if not daemon.requests.cancel(number_):
            raise NotFoundError(f"There is no request {number_[:50]!r} under way; GET /v1/admin/requests lists them.")
        return JSONResponse({"id": number_, "cancelled": True})

    async def history(_request: Request) -> Response:
        began, series = daemon.history.series()
        body = {"interval_s": daemon.history.interval_s, "from": round(daemon.wall_time(began), 3), "series": series}
        return JSONResponse(body)

    async def info(_request: Request) -> Response:
        server = daemon.catalog.server
        files = reloader.files()
        existing = await asyncio.to_thread(lambda: [path.exists() for path in files])
        body = {
            "version": version(),
            "python": platform.python_version(),
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - daemon.started, 3),
            "host": server.host,
            "port": server.port,
            "state_dir": str(server.state_dir),
            "watch": server.watch,
            "configuration": [
                {"path": str(path), "kind": kind, "exists": there}
                for (path, kind), there in zip(files.items(), existing, strict=True)
            ],
        }
        return JSONResponse(body)

    return [
        Route("/v1/admin/info", info, methods=["GET"]),
        Route("/v1/admin/models", models, methods=["GET"]),
        Route("/v1/admin/models/{name:path}/load", load, methods=["POST"]),
        Route("/v1/admin/models/{name:path}/unload", unload, methods=["POST"]),
        Route("/v1/admin/models/{name:path}/pin", pin, methods=["POST"]),
        Route("/v1/admin/models/{name:path}", model, methods=["GET"]),
        Route("/v1/admin/loads", loads, methods=["GET"]),
        Route("/v1/admin/loads/{id}", one_load, methods=["GET"]),
        Route("/v1/admin/loads/{id}", cancel_load, methods=["DELETE"]),
        Route("/v1/admin/tasks", tasks, methods=["GET"]),
        Route("/v1/admin/tasks/{name:path}", task, methods=["GET"]),
        Route("/v1/admin/reload", reload, methods=["POST"]),
        Route("/v1/admin/upgrade", upgrade, methods=["POST"]),
        Route("/v1/admin/gpu-memory", gpu_memory, methods=["GET"]),
        Route("/v1/admin/decisions", decisions, methods=["GET"]),
        Route("/v1/admin/queue", queue, methods=["GET"]),
        Route("/v1/admin/requests", requests, methods=["GET"]),
        Route("/v1/admin/requests/ended", ended, methods=["GET"]),
        Route("/v1/admin/requests/{id}/body", body, methods=["GET"]),
        Route("/v1/admin/requests/{id}", one_request, methods=["GET"]),
        Route("/v1/admin/requests/{id}", cancel, methods=["DELETE"]),
        Route("/v1/admin/history", history, methods=["GET"]),
    ]


def _about(daemon: Daemon, name: str) -> ModelId:
    """The model, or the partner's lease, of this name. Raises NotFoundError."""
    is_lease = name not in daemon.catalog.models and bool(daemon.engine.decisions(ModelId(name), limit=1))
    return ModelId(name) if is_lease else daemon.catalog.resolve(name).model.id


def health(daemon: Daemon) -> list[Route]:
    """`GET /health`, also as `/v1/health`, and `GET /livez`. Open to all, so they name nothing that a key protects but model names.

    `/livez` depends on nothing but the daemon itself.
    """

    async def answer(_request: Request) -> Response:
        if daemon.catalog.server.health == "runner":
            found = trouble(daemon)
            code = HTTPStatus.OK if found is None else HTTPStatus.SERVICE_UNAVAILABLE
            return JSONResponse(health_view(daemon, found), status_code=code)
        queue = daemon.engine.queue()
        loaded = daemon.engine.answering()
        status = "stopping" if queue.is_stopping else "ok"
        code = HTTPStatus.SERVICE_UNAVAILABLE if queue.is_stopping else HTTPStatus.OK
        body = {"status": status, "models_loaded": loaded, "queued": queue.waiting}
        return JSONResponse(body, status_code=code)

    async def alive(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return [
        Route("/health", answer, methods=["GET"]),
        Route("/v1/health", answer, methods=["GET"]),
        Route("/livez", alive, methods=["GET"]),
    ]
