"""The OpenAI-format model list: every public name, loaded or not."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.errors import NotFoundError
from supervisor.http.context import Context
from supervisor.http.views import Json


def routes(context: Context) -> list[Route]:
    """`GET /v1/models` and `GET /v1/models/{id}`."""
    created = int(context.wall_time(context.started))

    def view(name: str) -> Json:
        model = context.catalog.resolve(name).model
        config = context.catalog.models[model].config
        return {"id": name, "object": "model", "created": created, "owned_by": "llmux", "name": name, "type": config.type}

    async def listing(request: Request) -> Response:
        wanted = request.query_params.get("type")
        data = [view(name) for name in context.catalog.listing()]
        return JSONResponse({"object": "list", "data": [row for row in data if wanted in {None, row["type"]}]})

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        if context.catalog.find(name) is None:
            raise NotFoundError(context.catalog.unknown_model(name), code="model_not_found", param="model")
        return JSONResponse(view(name))

    return [Route("/v1/models", listing, methods=["GET"]), Route("/v1/models/{name:path}", one, methods=["GET"])]
