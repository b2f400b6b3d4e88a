"""The model management of llama.cpp's own server, at the root, for clients that speak it: Open WebUI's load and eject buttons.

A model is unloaded, loading, loaded or failed (llmux has no `sleeping`). The response to a load or unload comes at once;
the list and the event stream show its end, as with llama.cpp. Clients use public names: virtual models of one model share
its state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final
from urllib.parse import parse_qs

import msgspec
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.catalog import CatalogModel
from supervisor.core.types import ModelId
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.listed import listed
from supervisor.dialects.model_status import Status, status, status_view
from supervisor.dialects.openai import OpenAI
from supervisor.engine.events import CLIENTS, Subscription
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.parameters import json_object
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.io.distribution import version

Json = dict[str, JsonValue]

_SCOPES: Final = {
    "/models": "inference",
    "/models/load": "admin",
    "/models/unload": "admin",
    "/models/sse": "inference",
    "/props": "inference",
}


class LlamaCpp(OpenAI):
    """Its paths at the root; errors and keys are as OpenAI's, as with llama.cpp itself."""

    name = "llamacpp"

    def owns(self, path: str) -> bool:
        """`/models` and what is known below it."""
        return path in _SCOPES

    def scope_for(self, path: str) -> str | None:
        """Loads and unloads need the admin scope."""
        return _SCOPES[path]

    def is_for_daemon(self, method: str, path: str, query: bytes) -> bool:
        """`/props` of no model are the router's."""
        return path == "/props" and not parse_qs(query.decode("latin-1")).get("model")

    def routes(self, daemon: Daemon) -> list[Route]:
        """`GET /models`, `POST /models/load`, `POST /models/unload`, `GET /models/sse`, `GET /props`."""
        created, release = int(daemon.wall_time(daemon.started)), version()

        def entry(name: str, model: CatalogModel) -> Json:
            return {
                "id": name,
                "name": name,
                "object": "model",
                "owned_by": "llmux",
                "created": created,
                "status": msgspec.to_builtins(status_view(daemon, model.id)),
            }

        async def models(_request: Request) -> Response:
            return await listed((entry(row.name, row.model) for row in daemon.catalog.listing()), object="list")

        async def load(request: Request) -> Response:
            loading.ask_load(daemon, await _named(daemon, request))
            return JSONResponse({"success": True})

        async def unload(request: Request) -> Response:
            loading.ask_unload(daemon, await _named(daemon, request))
            return JSONResponse({"success": True})

        async def sse(_request: Request) -> Response:
            subscription = daemon.feed.subscribe(("model",), most=CLIENTS)
            return EventStream(_changes(daemon, subscription), subscription)

        async def props(request: Request) -> Response:
            if (name := request.query_params.get("model")) is not None:  # no worker has them
                daemon.catalog.resolve(name)
                raise InvalidRequestError(f"{name} has no /props.", code="endpoint_not_supported", param="model")
            return JSONResponse(
                {
                    "role": "router",  # by which its clients know that models are named, listed and loaded
                    "max_instances": daemon.catalog.limits.max_loaded.get("llm", 0),  # 0: as many as fit
                    "models_autoload": True,
                    "model_alias": "llmux",
                    "model_path": "none",
                    "default_generation_settings": {"params": {}, "n_ctx": 0},
                    "ui_settings": {},
                    "build_info": f"llmux {release}",
                }
            )

        return [
            Route("/props", props, methods=["GET"]),
            Route("/models", models, methods=["GET"]),
            Route("/models/load", load, methods=["POST"]),
            Route("/models/unload", unload, methods=["POST"]),
            Route("/models/sse", sse, methods=["GET"]),
        ]


async def _named(daemon: Daemon, request: Request) -> ModelId:
    name = (await json_object(request)).get("model")  # clients of other servers send fields for those, too
    if not isinstance(name, str):
        raise InvalidRequestError('The body must be {"model": "NAME"}; GET /models lists the choice.', param="model")
    return daemon.catalog.resolve(name).model.id


async def _changes(daemon: Daemon, subscription: Subscription) -> AsyncGenerator[bytes, None]:
    """Every model's status first, then each change."""
    told: dict[str, Status] = {}

    def news(kind: str) -> bytes:
        lines = []
        for row in daemon.catalog.listing():
            now = status(daemon.engine.figures_of(row.model.id))
            if told.get(row.name) != now:
                told[row.name] = now
                lines.append(_line(row.name, kind, now))
        return b"".join(lines)

    yield news("model_status")
    while (events := await subscription.next(KEEPALIVE_S)) is not None:
        found = news("status_change")
        if found or not events:
            yield found


def _line(name: str, kind: str, value: Status) -> bytes:
    event = {"model": name, "event": kind, "data": {"status": value}}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


LLAMACPP: Final = LlamaCpp()
