"""The admin API, first part: what is loaded, loading and unloading, memory, decisions."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.core.types import ModelId
from supervisor.errors import InvalidRequestError
from supervisor.http.context import Context
from supervisor.http.inference import unknown_model
from supervisor.http.views import decision_view, memory_view, model_view

MAX_DECISIONS = 1000


def routes(context: Context) -> list[Route]:
    """Everything below `/v1/admin`."""

    def physical(request: Request) -> ModelId:
        return named(request.path_params["name"])

    def named(name: str) -> ModelId:
        route = context.catalog.route(name)
        if route is None:
            raise unknown_model(context.catalog, name)
        return route.model.id

    async def models(_request: Request) -> Response:
        views = (model_view(context, model) for model in context.catalog.models)
        return JSONResponse({"object": "list", "data": [view for view in views if view is not None]})

    async def model(request: Request) -> Response:
        return JSONResponse(model_view(context, physical(request)))

    async def load(request: Request) -> Response:
        name = physical(request)
        await context.engine.load(name)
        return JSONResponse(model_view(context, name))

    async def unload(request: Request) -> Response:
        name = physical(request)
        await context.engine.unload(name, force=_flag(request, "force"))
        return JSONResponse(model_view(context, name))

    async def gpu_memory(_request: Request) -> Response:
        return JSONResponse(memory_view(context))

    async def decisions(request: Request) -> Response:
        name = request.query_params.get("model")
        limit = _number(request, "limit", 100, MAX_DECISIONS)
        kept = context.engine.journal.decisions(named(name) if name is not None else None, limit=limit)
        return JSONResponse({"object": "list", "data": [decision_view(context, decision) for decision in kept]})

    return [
        Route("/v1/admin/models", models, methods=["GET"]),
        Route("/v1/admin/models/{name:path}/load", load, methods=["POST"]),
        Route("/v1/admin/models/{name:path}/unload", unload, methods=["POST"]),
        Route("/v1/admin/models/{name:path}", model, methods=["GET"]),
        Route("/v1/admin/gpu-memory", gpu_memory, methods=["GET"]),
        Route("/v1/admin/decisions", decisions, methods=["GET"]),
    ]


def health(context: Context) -> Route:
    """`GET /health`: alive, and what is loaded. Open to all, so it names nothing that a key protects but model names."""

    async def answer(_request: Request) -> Response:
        world = context.engine.journal.scheduler.world
        loaded = [record.id for record in world.records.values() if record.answering]
        status = "stopping" if world.shutting_down else "ok"
        code = HTTPStatus.SERVICE_UNAVAILABLE if world.shutting_down else HTTPStatus.OK
        body = {"status": status, "models_loaded": loaded, "queued": len(world.queue)}
        return JSONResponse(body, status_code=code)

    return Route("/health", answer, methods=["GET"])


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in {"true", "false", "1", "0"}:
        raise InvalidRequestError(f"{name}: expected true or false, got {value!r}.", param=name)
    return value in {"true", "1"}


def _number(request: Request, name: str, default: int, most: int) -> int:
    value = request.query_params.get(name, str(default))
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise InvalidRequestError(f"{name}: expected a whole number from 1 to {most}, got {value!r}.", param=name)
    return int(value)
