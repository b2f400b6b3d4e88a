"""Models, their workers' logs, and their loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from supervisor.api.operation import Api
from supervisor.core.events import PinRequested
from supervisor.core.types import ModelId, base_of
from supervisor.daemon import loading
from supervisor.daemon.observability.views import model_view
from supervisor.dialects.listed import listed
from supervisor.engine.events import Subscription
from supervisor.errors import NotFoundError
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.gateway.operation import Group
from supervisor.host.process.logs import LogReader, tail
from supervisor.schema.load import Load, LoadList
from supervisor.schema.model import LoadRequest, LogQuery, ModelList, ModelView, PinRequest, UnloadQuery
from supervisor.schema.operation import EVENTS, PLAIN, Example, Parameter

LINE_BYTES: Final = 512  # bytes read per line: clients show no longer lines in full
FOLLOW_INTERVAL_S: Final = 0.3
RESTARTED: Final = "[the daemon restarted; what follows was written since the connection broke]"
_NAME: Final = "/v1/admin/models/Tiny-Instruct"
GROUP: Final = Group(
    "Administration: models",
    "What is loaded, why, and loads and unloads. `{name}` may be a model or a virtual model; the action always applies to the model.",
)


def _model_named(api: Api, name: str) -> ModelId:
    """The model for a public name. Raises NotFoundError."""
    return api.daemon.catalog.resolve(name).model.id


async def _view_of(api: Api, model: ModelId) -> ModelView:
    await api.daemon.know_capabilities()
    found = model_view(api.daemon, model)
    if found is None:
        raise NotFoundError(f"The model {model[:200]!r} was removed.", code="model_not_found")
    return found


@GROUP.operation("GET", "/v1/admin/models", answer=ModelList)
async def list_models(api: Api) -> Response:
    """All models. Each has the fields of `GET /v1/admin/models/{name}`."""
    await api.daemon.know_capabilities()
    # Each view is made later than the one before, with the state at that moment.
    views = (model_view(api.daemon, model) for model in api.daemon.catalog.models)
    return await listed((view for view in views if view is not None), object="list")


@GROUP.operation("GET", "/v1/admin/models/{name:path}", errors=(404,), example=Example(path=_NAME))
async def get_model(api: Api, name: str) -> ModelView:
    """One model's whole state."""
    return await _view_of(api, _model_named(api, name))


@GROUP.operation(
    "POST",
    "/v1/admin/models/{name:path}/load",
    is_body_optional=True,
    errors=(404, 503, 504),
    example=Example({"overrides": {"n_ctx": 1024}}, path=_NAME + "/load"),
)
async def load_model(api: Api, name: str, body: LoadRequest) -> ModelView:
    """Load the model; the answer is its view when it is ready.

    An optional body overrides keys that `load_constraints` allows; llmux never writes them to a file.

    If the running worker was started with other values, a new one replaces it after its requests. Overrides stay, also through
    evictions, until an operator unloads the model or loads it with others (`{}` removes all), or a reload changes its
    configuration. A load without a body keeps them. 400 `invalid_override` names every key that can't be overridden this way,
    with its range. A model of a backend of llm-pool's takes its names as well: `llama_server_n_ctx`, `vllm_max_model_len`.

    A load gives a failed model a fresh start. It continues if the caller disconnects. If it fails, the response is 503
    `load_failed` or `runtime_not_installed`.
    """
    model = _model_named(api, name)
    await loading.load(api.daemon, model, body.overrides, name)
    return await _view_of(api, model)


@GROUP.operation(
    "POST",
    "/v1/admin/models/{name:path}/unload",
    errors=(404, 503),
    example=Example(path="/v1/admin/models/tiny-embed/unload"),
)
async def unload_model(api: Api, name: str, query: UnloadQuery) -> ModelView:
    """Unload the model after its running requests; the answer comes when its memory is back."""
    model = _model_named(api, name)
    await loading.unload(api.daemon, model, name, force=query.force)
    return await _view_of(api, model)


@GROUP.operation(
    "POST",
    "/v1/admin/models/{name:path}/pin",
    errors=(404,),
    example=Example({"pin": True}, path=_NAME + "/pin"),
)
async def pin_model(api: Api, name: str, body: PinRequest) -> ModelView:
    """Protect the model from eviction and from keep-alives.

    `{"pin": false}` removes the protection, even if the configuration pins the model. Both last until the daemon ends.
    """
    model = _model_named(api, name)
    api.daemon.engine.post(PinRequested(model, body.pin))
    return await _view_of(api, model)


@GROUP.operation(
    "GET",
    "/v1/admin/models/{name:path}/logs",
    answer_type=PLAIN,
    stream_type=EVENTS,
    errors=(404, 503),
    parameters=(Parameter("last-event-id", "Go on behind this one.", place="header"),),
    example=Example(path=_NAME + "/logs?lines=3"),
)
async def read_logs(api: Api, name: str, query: LogQuery, request: Request) -> Response:
    """The end of the worker's log, as plain text.

    `?follow=true` streams the same lines and then each new one as server-sent events, also across restarts of the worker,
    until the client disconnects. Events have an `id`; a client that was cut off, because the daemon restarted for one, sends the
    last one as `Last-Event-ID` and gets what was added since. Lines of llmux itself are in square brackets: that the daemon
    restarted, that lines may be missing.
    """
    daemon = api.daemon
    first = daemon.catalog.resolve(base_of(ModelId(name))).model.id
    known = daemon.engine.load_status(replica := ModelId(first + name.removeprefix(base_of(ModelId(name)))))
    path = daemon.fleet.log_path(first if known is None else replica)
    if query.follow:
        reader, after = LogReader(path), request.headers.get("last-event-id")
        begin = partial(_lines_since, reader, after, api.run) if after else partial(reader.begin, query.lines)
        closing = daemon.hub.subscribe(())
        return EventStream(_follow_lines(reader, begin, api.run, closing), closing)
    lines = query.lines
    kept = await asyncio.to_thread(tail, path, lines, lines * LINE_BYTES) if lines else ()
    return PlainTextResponse("".join(f"{line}\n" for line in kept))


def _lines_since(reader: LogReader, after: str, run: str) -> list[str]:
    """The lines that were added after the line with the id `after`."""
    daemon, _, position = after.partition("-")
    lines = reader.resume(position)
    return lines if daemon == run else [RESTARTED, *lines]


async def _follow_lines(
    reader: LogReader, begin: Callable[[], list[str]], run: str, closing: Subscription
) -> AsyncGenerator[bytes, None]:
    """The lines that `begin` returns, then each new line, until the daemon stops. The last line of each piece has an id."""
    found = await asyncio.to_thread(begin)
    yield b": following\n\n" + _encode_lines(found, f"{run}-{reader.position}")
    silent_s = 0.0
    while await closing.next(FOLLOW_INTERVAL_S) is not None:
        found = await asyncio.to_thread(reader.read)
        silent_s = 0.0 if found else silent_s + FOLLOW_INTERVAL_S
        if found or silent_s >= KEEPALIVE_S:
            silent_s = 0.0
            yield _encode_lines(found, f"{run}-{reader.position}")


def _encode_lines(lines: list[str], identity: str) -> bytes:
    events = [f"data: {line}\n\n" for line in lines]
    if events:
        events[-1] = f"id: {identity}\n{events[-1]}"
    return "".join(events).encode()


@GROUP.operation("GET", "/v1/admin/loads")
async def list_loads(api: Api) -> LoadList:
    """[Loads](operations.md#loads): those that wait or run and the last 100 that ended, the newest first.

    `estimates` says how good the expected times were: of how many `loads`, `mean_error_s` in seconds, `mean_error` as a share
    of the time. Each has the fields of `GET /v1/admin/loads/{id}`.
    """
    return api.daemon.loads.views()


@GROUP.operation("GET", "/v1/admin/loads/{id}", errors=(404,), example=Example(path="/v1/admin/loads/1"))
async def get_load(api: Api, id: str) -> Load:
    """One of them.

    404 `load_not_found` where it isn't kept any more.
    """
    return api.daemon.loads.view(id)


@GROUP.operation(
    "DELETE",
    "/v1/admin/loads/{id}",
    errors=(404,),
    example=Example(path="/v1/admin/loads/7", needs="a load under way"),
)
async def cancel_load(api: Api, id: str) -> Load:
    """Cancel it, whether it waits or loads.

    Requests that wait for the model get 503 `model_unloaded`, unless another replica serves them. The next request, or
    `POST …/load`, begins another load. 400 `load_ended` for one that has ended.
    """
    return await api.daemon.loads.cancel(id)
