"""What the daemon tells Ollama's clients itself: its version, the models, the loaded ones, and what one of them can do.

Listed are the public names of models that chat or embed; Ollama's clients can do nothing with others. What they want to know
and llmux doesn't is empty, as their types have it, never made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from http import HTTPStatus
from typing import Final

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from supervisor import catalog
from supervisor.catalog import CatalogModel
from supervisor.core.types import ModelId
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import chat
from supervisor.dialects.listed import listed
from supervisor.dialects.model_status import status
from supervisor.dialects.ollama import pulls
from supervisor.dialects.ollama.answers import timestamp
from supervisor.dialects.openai import LATEST
from supervisor.engine.status import ModelStatus
from supervisor.errors import InvalidRequestError, LlmuxError
from supervisor.gateway.body.parameters import json_object

Json = dict[str, JsonValue]
ModelName = Callable[[str, Callable[[str], bool]], str]

VERSION: Final = "0.12.11"
"""Of Ollama's API as it is served here; some clients refuse one that is too low."""
_MIB: Final = 1 << 20
_FOR_EVER_S: Final = 100 * 365 * 86_400  # until a model goes that stays
_UNKNOWN: Final = "unknown"  # an architecture, which the names of other facts begin with
_CHATS: Final = f"POST {chat.PATH}"
_EMBEDS: Final = "POST /v1/embeddings"


class NotOfferedError(LlmuxError):
    """Models come from the configuration, so nothing here makes, fetches or removes one.

    501, not 404, by which Ollama's clients would take the model for missing, and some then try to fetch it.
    """

    status = HTTPStatus.NOT_IMPLEMENTED
    type = "invalid_request_error"
    code = "not_offered"
    lasts = True


async def running(_request: Request) -> Response:
    """The answer at the root by which clients see that a server is there."""
    return PlainTextResponse("Ollama is running")


def routes(daemon: Daemon, model_name: ModelName) -> list[Route]:
    """All of them. `model_name`: what the daemon calls a model, see Dialect."""

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(_request: Request) -> Response:
        await daemon.know_capabilities()
        rows = _listed(daemon.catalog.listing())
        effective = {row.model.id: daemon.fleet.effective(row.model.id) for row in rows}
        sizes = await asyncio.to_thread(_sizes, effective.values())
        modified = timestamp(daemon.wall_time(daemon.started))
        found = (
            {**_entry(_tagged(row.name), effective[row.model.id]), "modified_at": modified, "size": sizes[row.model.id]}
            for row in rows
        )
        return await listed(found, "models")

    async def ps(_request: Request) -> Response:
        await daemon.know_capabilities()
        active = {one.id: one for one in daemon.engine.active() if status(one) == "loaded"}
        rows = _listed(row for row in daemon.catalog.listing() if row.model.id in active)
        loaded = [_loaded(daemon, row, _tagged(row.name), active[row.model.id]) for row in rows]
        return JSONResponse({"models": loaded})

    async def show(request: Request) -> Response:
        row = await _named(request)
        await daemon.know_capabilities()
        model = daemon.fleet.effective(row.model.id)
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": _details(model),
                "model_info": _info(model),
                "capabilities": _capabilities(model),
                "modified_at": timestamp(daemon.wall_time(daemon.started)),
            }
        )

    async def pull(request: Request) -> Response:
        """Of a model that is there already, Ollama fetches nothing either."""
        fields = await json_object(request)
        name = _name_in(fields)
        is_stream = fields.get("stream") is not False
        row = daemon.catalog.route(model_name(name, _is_known))
        if row is not None and await loading.may_pull(daemon, row.model.id):
            return await pulls.pulled(daemon, row.model.id, is_stream=is_stream)
        size = 0 if row is None else (await asyncio.to_thread(_sizes, [row.model]))[row.model.id]
        if row is None or (row.model.config.source is not None and not size):
            raise NotOfferedError(
                f"llmux fetches no model for clients that isn't in its configuration, and only where server.allow_pull is on, "
                f"so not {name[:200]!r}: its operator adds one with `llmux add`, and gets its files with `llmux pull`.",
                param="model",
            )
        return pulls.there(is_stream=is_stream)

    async def refused(request: Request) -> Response:
        raise NotOfferedError(
            f"{request.url.path[:100]} is not offered: the models come from llmux's configuration. Its operator adds one "
            "with `llmux add` and removes one with `llmux remove`."
        )

    def _is_known(name: str) -> bool:
        return daemon.catalog.route(name) is not None

    def _tagged(name: str) -> str:
        """Some clients, such as older versions of Open WebUI, add the tag to a name without one and look for that in the list."""
        has_tag = ":" in name.rpartition("/")[2] or _is_known(name + LATEST)
        return name if has_tag else name + LATEST

    async def _named(request: Request) -> catalog.Route:
        return daemon.catalog.resolve(model_name(_name_in(await json_object(request)), _is_known))

    return [
        Route("/api/version", version, methods=["GET"]),
        Route("/api/tags", tags, methods=["GET"]),
        Route("/api/ps", ps, methods=["GET"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/pull", pull, methods=["POST"]),
        Route("/api/push", refused, methods=["POST"]),
        Route("/api/create", refused, methods=["POST"]),
        Route("/api/copy", refused, methods=["POST"]),
        Route("/api/delete", refused, methods=["DELETE"]),
        Route("/api/blobs/{digest}", refused, methods=["HEAD", "POST"]),
    ]


def _name_in(fields: Json) -> str:
    """The model of a request; older clients call the field `name`. Raises InvalidRequestError."""
    name = fields.get("model") or fields.get("name")
    if not isinstance(name, str):
        raise InvalidRequestError('The body must be {"model": "NAME"}; GET /api/tags lists the choice.', param="model")
    return name


def _listed(rows: Iterable[catalog.Route]) -> list[catalog.Route]:
    return [row for row in rows if _CHATS in row.model.paths or _EMBEDS in row.model.paths]


def _sizes(models: Iterable[CatalogModel]) -> dict[ModelId, int]:
    """Bytes of their weights; 0 where that isn't known. Blocks on looking at files."""
    found = {}
    for model in models:
        found[model.id] = 0
        with contextlib.suppress(OSError):
            found[model.id] = sum(file.stat().st_size for file in model.adapter.weights(model.config))
    return found


def _entry(name: str, model: CatalogModel) -> Json:
    digest = sha256(name.encode()).hexdigest()  # of the name: the same as long as it is called so
    return {"name": name, "model": name, "digest": digest, "details": _details(model)}


def _details(model: CatalogModel) -> Json:
    family = _architecture(model)
    return {
        "parent_model": "",
        "format": "gguf" if model.config.runtime == "llama_server" else "",
        "family": family or "",
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _architecture(model: CatalogModel) -> str | None:
    known = model.known_capabilities
    return None if known is None else known.architecture


def _context(model: CatalogModel) -> int | None:
    known = model.known_capabilities
    return None if known is None else known.context


def _info(model: CatalogModel) -> Json:
    """Clients look for the context below the architecture's name, so there has to be one."""
    architecture, context = _architecture(model) or _UNKNOWN, _context(model)
    info: Json = {"general.architecture": architecture}
    return info if context is None else {**info, f"{architecture}.context_length": context}


def _capabilities(model: CatalogModel) -> list[JsonValue]:
    known = model.known_capabilities
    is_chat = _CHATS in model.paths
    has = {
        "completion": is_chat,
        "embedding": _EMBEDS in model.paths and model.config.type in {"embedding", "vision"},
        "vision": is_chat and known is not None and "image" in known.modalities,
        "tools": is_chat and known is not None and bool(known.tools),
        "thinking": is_chat and known is not None and bool(known.thinking),
    }
    return [name for name, can in has.items() if can]


def _loaded(daemon: Daemon, row: catalog.Route, name: str, found: ModelStatus) -> Json:
    model = daemon.fleet.effective(row.model.id)
    on_gpus = {device.id for device in daemon.engine.devices() if not device.spec.takes_whole}
    held = [(lease.device, lease.measured_mib or lease.mib) for lease in found.leases]
    left_s = _FOR_EVER_S if found.unload_s is None else found.unload_s
    return {
        **_entry(name, model),
        "size": sum(mib for _, mib in held) * _MIB,
        "size_vram": sum(mib for device, mib in held if device in on_gpus) * _MIB,
        "expires_at": timestamp(time.time() + left_s),
        "context_length": _context(model) or 0,
    }
