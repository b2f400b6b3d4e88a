"""The OpenAI-format model list: every public name, loaded or not, with what its model can do.

Clients read that in several places: `context_length`, `architecture` and `supported_parameters` are where OpenRouter's
clients look, `max_model_len` is vLLM's; `capabilities` has everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtimes.model_config import ModelType
from supervisor import catalog
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.views import Json, capabilities
from supervisor.dialects.model_status import status_view
from supervisor.errors import InvalidRequestError

TYPES: Final[tuple[str, ...]] = get_args(ModelType)
_OUTPUT: Final[Mapping[ModelType, str]] = {
    "llm": "text",
    "asr": "text",
    "tts": "audio",
    "image": "image",
    "embedding": "embeddings",
    "vision": "embeddings",
}


def routes(daemon: Daemon) -> list[Route]:
    """`GET /v1/models` and `GET /v1/models/{id}`."""
    created = int(daemon.wall_time(daemon.started))

    def view(entry: catalog.Route) -> Json:
        about: Json = {
            "id": entry.name,
            "object": "model",
            "created": created,
            "owned_by": "llmux",
            "name": entry.name,
            "type": entry.model.config.type,
            "runtime": entry.model.config.runtime,
            "status": status_view(daemon, entry.model.id),
            **_abilities(entry, daemon.fleet.effective(entry.model.id)),
        }
        return about if entry.description is None else about | {"description": entry.description}

    async def listing(request: Request) -> Response:
        wanted = request.query_params.get("type")
        if wanted is not None and wanted not in TYPES:
            raise InvalidRequestError(f"type: expected one of {', '.join(TYPES)}, got {wanted[:50]!r}.", param="type")
        await daemon.know_capabilities()
        data = [view(row) for row in daemon.catalog.listing() if wanted in {None, row.model.config.type}]
        return JSONResponse({"object": "list", "data": data})

    async def one(request: Request) -> Response:
        await daemon.know_capabilities()
        return JSONResponse(view(daemon.catalog.resolve(request.path_params["name"])))

    return [Route("/v1/models", listing, methods=["GET"]), Route("/v1/models/{name:path}", one, methods=["GET"])]


def _abilities(entry: catalog.Route, model: catalog.CatalogModel) -> Json:
    known = model.known_capabilities
    if known is None:
        return {}
    output = [_OUTPUT[model.config.type]]
    return {
        "context_length": known.context,
        "max_model_len": known.context,
        "architecture": {"input_modalities": list(known.modalities), "output_modalities": list(output)},
        "supported_parameters": ["tools", "tool_choice"] if known.tools else [],
        "capabilities": {
            **(capabilities(model, entry) or {}),
            "output_modalities": list(output),
        },
    }
