"""The OpenAI-format model list: every public name, loaded or not, with what its model can do.

Clients read that in several places: `context_length`, `architecture` and `supported_parameters` are where OpenRouter's
clients look, `max_model_len` is vLLM's; `capabilities` has everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtimes.model_config import ModelType
from supervisor import catalog
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.views import capabilities
from supervisor.dialects.listed import listed
from supervisor.dialects.model_status import Json, status, status_view
from supervisor.errors import InvalidRequestError, NotFoundError

_LOADED: Final[Mapping[str | None, bool | None]] = {None: None, "1": True, "true": True, "0": False, "false": False}
_TASK: Final = "load/"
"""What a runner's client asks for where no model is called so."""
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

    def view(entry: catalog.Route, model: catalog.CatalogModel) -> Json:
        about: Json = {
            "id": entry.name,
            "object": "model",
            "created": created,
            "owned_by": "llmux",
            "name": entry.name,
            "type": entry.model.config.type,
            "runtime": entry.model.config.runtime,
            "status": status_view(daemon, entry.model.id),
            **_abilities(entry, model),
        }
        return about if entry.description is None else about | {"description": entry.description}

    async def listing(request: Request) -> Response:
        wanted, said = (request.query_params.get(name) for name in ("type", "loaded"))
        if said not in _LOADED:
            raise InvalidRequestError(f"loaded: expected 1 or 0, got {str(said)[:50]!r}.", param="loaded")
        if wanted is not None and wanted not in TYPES:
            raise InvalidRequestError(f"type: expected one of {', '.join(TYPES)}, got {wanted[:50]!r}.", param="type")
        await daemon.know_capabilities()
        only_loaded = daemon.catalog.server.responses == "llm-pool" if said is None else _LOADED[said]
        rows = [row for row in daemon.catalog.listing() if wanted in {None, row.model.config.type}]
        # Each is told of as it is in one moment, and a later one in a later moment; which there are is of the first.
        found = [(row, daemon.fleet.effective(row.model.id)) for row in rows]
        data = (view(row, model) for row, model in found if not only_loaded or _is_loaded(daemon, row))
        return await listed(data, object="list")

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        if name.startswith(_TASK) and daemon.catalog.route(name) is None:
            raise NotFoundError(f"There is no load task {name.removeprefix(_TASK)[:100]!r}.", code="task_not_found")
        await daemon.know_capabilities()
        entry = daemon.catalog.resolve(name)
        return JSONResponse(view(entry, daemon.fleet.effective(entry.model.id)))

    return [Route("/v1/models", listing, methods=["GET"]), Route("/v1/models/{name:path}", one, methods=["GET"])]


def _is_loaded(daemon: Daemon, row: catalog.Route) -> bool:
    """Does it answer without a load? A task: does one of its candidates?"""
    candidates = row.candidates if isinstance(row, catalog.Task) else (row,)
    return any(status(daemon.engine.figures_of(one.model.id)) == "loaded" for one in candidates)


def _abilities(entry: catalog.Route, model: catalog.CatalogModel) -> Json:
    known = model.known_capabilities
    if known is None:
        return {}
    output, found = [_OUTPUT[model.config.type]], capabilities(model, entry)
    return {
        "context_length": known.context,
        "max_model_len": known.context,
        "architecture": {"input_modalities": list(known.modalities), "output_modalities": list(output)},
        "supported_parameters": ["tools", "tool_choice"] if known.tools else [],
        "capabilities": {**({} if found is None else asdict(found)), "output_modalities": list(output)},
    }
