"""The model management of llama.cpp's own server, at the root, for clients that speak it: Open WebUI's load and eject buttons.

Its words: a model is unloaded, loading, loaded or failed (we know no `sleeping`). Loads and unloads are begun and answered
at once; their end shows in the list and in the event stream, as with llama.cpp. Names are the public ones: virtual models
of one model share its state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.catalog import CatalogModel
from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon import loading
from supervisor.daemon.daemon import Context
from supervisor.daemon.events import CLIENTS, Subscription
from supervisor.daemon.feed import Feed
from supervisor.errors import InvalidRequestError
from supervisor.http.admin import physical_model
from supervisor.proxy.event_stream import KEEPALIVE_S, EventStream
from supervisor.proxy.parameters import json_object

Json = dict[str, JsonValue]
Status = Literal["unloaded", "loading", "loaded", "failed"]


def routes(context: Context, feed: Feed) -> list[Route]:
    """`GET /models`, `POST /models/load`, `POST /models/unload`, `GET /models/sse`."""
    created = int(context.wall_time(context.started))

    def entry(name: str, model: CatalogModel) -> Json:
        return {
            "id": name,
            "name": name,
            "object": "model",
            "owned_by": "llmux",
            "created": created,
            "status": status_view(context, model.id),
        }

    async def models(_request: Request) -> Response:
        data = [entry(row.name, row.model) for row in context.catalog.listing()]
        return JSONResponse({"object": "list", "data": data})

    async def load(request: Request) -> Response:
        loading.ask_load(context, await _named(context, request))
        return JSONResponse({"success": True})

    async def unload(request: Request) -> Response:
        loading.ask_unload(context, await _named(context, request))
        return JSONResponse({"success": True})

    async def sse(_request: Request) -> Response:
        subscription = feed.subscribe(("model",), most=CLIENTS)
        return EventStream(_changes(context, subscription), subscription)

    return [
        Route("/models", models, methods=["GET"]),
        Route("/models/load", load, methods=["POST"]),
        Route("/models/unload", unload, methods=["POST"]),
        Route("/models/sse", sse, methods=["GET"]),
    ]


def status_view(context: Context, model: ModelId) -> Json:
    """A model's `status`, with what a failed one died of."""
    record = context.engine.journal.scheduler.state.models.get(model)
    value = status(context, model)
    if value != "failed" or record is None or record.crash is None:
        return {"value": value}
    return {"value": value, "failed": True, "exit_code": record.crash.exit_code, "reason": record.crash.summary}


def status(context: Context, model: ModelId) -> Status:
    """A model's state in llama.cpp's words."""
    world = context.engine.journal.scheduler.state
    record = world.models.get(model)
    if record is None:
        return "unloaded"
    match record.state:
        case WorkerState.READY | WorkerState.DRAINING:
            return "loaded" if record.answering else "loading"
        case WorkerState.STARTING | WorkerState.BACKOFF:
            return "loading"
        case WorkerState.FAILED:
            return "failed"
        case WorkerState.STOPPED | WorkerState.STOPPING:
            is_wanted = model in world.wanted or record.asked_at is not None or world.queue.count(model) > 0
            return "loading" if is_wanted else "unloaded"


async def _named(context: Context, request: Request) -> ModelId:
    name = (await json_object(request, ("model",))).get("model")
    if not isinstance(name, str):
        raise InvalidRequestError('The body must be {"model": "NAME"}; GET /models lists the choice.', param="model")
    return physical_model(context, name)


async def _changes(context: Context, subscription: Subscription) -> AsyncGenerator[bytes, None]:
    """Every model's status first, then each change."""
    told: dict[str, Status] = {}

    def news(kind: str) -> bytes:
        lines = []
        for row in context.catalog.listing():
            now = status(context, row.model.id)
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
