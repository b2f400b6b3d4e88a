"""The admin API: models and what is done to them, memory, decisions, requests in flight, history."""

from __future__ import annotations

import sys
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.core.events import PinAsked
from supervisor.core.types import ModelId
from supervisor.daemon import loading
from supervisor.daemon.daemon import Context
from supervisor.daemon.pipeline import unknown_model
from supervisor.daemon.views import decision_view, memory_view, model_view
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.proxy.parameters import flag, json_object, number

MAX_DECISIONS = 1000


def routes(context: Context) -> list[Route]:
    """What is below `/v1/admin` and answers at once, or when a load or unload is done."""

    def physical(request: Request) -> ModelId:
        return physical_model(context, request.path_params["name"])

    async def models(_request: Request) -> Response:
        await context.know_capabilities()
        views = (model_view(context, model) for model in context.catalog.models)
        return JSONResponse({"object": "list", "data": [view for view in views if view is not None]})

    async def view(name: ModelId) -> Response:
        await context.know_capabilities()
        return JSONResponse(model_view(context, name))

    async def model(request: Request) -> Response:
        return await view(physical(request))

    async def load(request: Request) -> Response:
        name = physical(request)
        overrides = (await json_object(request, ("overrides",))).get("overrides")
        if overrides is not None and not isinstance(overrides, dict):
            raise InvalidRequestError('"overrides" must be an object of keys and values.', param="overrides")
        await loading.load(context, name, overrides)
        return await view(name)

    async def unload(request: Request) -> Response:
        name = physical(request)
        await loading.unload(context, name, force=flag(request, "force"))
        return await view(name)

    async def pin(request: Request) -> Response:
        name = physical(request)
        wanted = (await json_object(request, ("pin",))).get("pin")
        if not isinstance(wanted, bool):
            raise InvalidRequestError('The body must be {"pin": true} or {"pin": false}.', param="pin")
        context.engine.post(PinAsked(name, wanted))
        return await view(name)

    async def gpu_memory(_request: Request) -> Response:
        return JSONResponse(memory_view(context))

    async def decisions(request: Request) -> Response:
        journal = context.engine.journal
        name = request.query_params.get("model")
        about = physical_model(context, name) if name is not None else None
        limit = number(request, "limit", 100, MAX_DECISIONS)
        if "after" in request.query_params:
            newer = journal.decisions_since(number(request, "after", 0, sys.maxsize, least=0))
            kept = [decision for decision in newer if about in {None, decision.model}][:limit]
        else:
            kept = journal.decisions(about, limit=limit)
        return JSONResponse({"object": "list", "data": [decision_view(context, decision) for decision in kept]})

    async def requests(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": context.requests.views()})

    async def cancel(request: Request) -> Response:
        number_ = request.path_params["id"]
        if not context.requests.cancel(number_):
            raise NotFoundError(f"There is no request {number_[:50]!r} under way; GET /v1/admin/requests lists them.")
        return JSONResponse({"id": number_, "cancelled": True})

    async def history(_request: Request) -> Response:
        began, series = context.history.series()
        body = {"interval_s": context.history.interval_s, "from": round(context.wall_time(began), 3), "series": series}
        return JSONResponse(body)

    return [
        Route("/v1/admin/models", models, methods=["GET"]),
        Route("/v1/admin/models/{name:path}/load", load, methods=["POST"]),
        Route("/v1/admin/models/{name:path}/unload", unload, methods=["POST"]),
        Route("/v1/admin/models/{name:path}/pin", pin, methods=["POST"]),
        Route("/v1/admin/models/{name:path}", model, methods=["GET"]),
        Route("/v1/admin/gpu-memory", gpu_memory, methods=["GET"]),
        Route("/v1/admin/decisions", decisions, methods=["GET"]),
        Route("/v1/admin/requests", requests, methods=["GET"]),
        Route("/v1/admin/requests/{id}", cancel, methods=["DELETE"]),
        Route("/v1/admin/history", history, methods=["GET"]),
    ]


def physical_model(context: Context, name: str) -> ModelId:
    """The model a public name stands for. Raises NotFoundError."""
    route = context.catalog.route(name)
    if route is None:
        raise unknown_model(context.catalog, name)
    return route.model.id


def health(context: Context) -> Route:
    """`GET /health`: alive, and what is loaded. Open to all, so it names nothing that a key protects but model names."""

    async def answer(_request: Request) -> Response:
        world = context.engine.journal.scheduler.state
        loaded = [record.id for record in world.models.values() if record.answering]
        status = "stopping" if world.shutting_down else "ok"
        code = HTTPStatus.SERVICE_UNAVAILABLE if world.shutting_down else HTTPStatus.OK
        body = {"status": status, "models_loaded": loaded, "queued": len(world.queue)}
        return JSONResponse(body, status_code=code)

    return Route("/health", answer, methods=["GET"])
