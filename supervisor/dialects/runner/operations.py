"""The operations of schedulers at a model runner."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from msgspec import to_builtins
from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import Response

from supervisor.core.types import ModelId
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.health import lifetime
from supervisor.daemon.op_tokens import FIELD
from supervisor.dialects.runner import flush, lifecycle, types
from supervisor.dialects.runner.capabilities import FRESH_S, RunnerApi
from supervisor.dialects.runner.models import model_of
from supervisor.errors import InvalidRequestError, NotFoundError, UnavailableError
from supervisor.gateway.operation import Group
from supervisor.gateway.route.caching import check_tag
from supervisor.jobs.job import KEY
from supervisor.schema.operation import JSON, Example

TASKS: Final = "/v1/models/load/"
_NAMES: Final = frozenset({"modelId", "tenantId", "tag"})
"""The fields that limit a flush."""
GROUP: Final = Group(
    "Model runner",
    "For schedulers that route requests to several model runners and tell each what to load.",
    error=types.RunnerError,
)

Json = dict[str, Any]


@GROUP.operation("GET", "/v1/capabilities", scope="inference", answer=types.RunnerCapabilities, errors=(503,))
async def get_capabilities(api: RunnerApi) -> Response:
    """What this runner can do, and how full it is.

    Made anew after five seconds. 503 while the daemon starts or stops.
    """
    if (phase := lifetime(api.daemon)) is not None:
        raise UnavailableError(f"The runner is {phase}.", retry_after_s=FRESH_S)
    headers = {"cache-control": f"private, max-age={FRESH_S:.0f}"}
    return Response(encode(await api.capabilities()), headers=headers, media_type=JSON)


@GROUP.operation(
    "POST",
    "/v1/models/load",
    answer=types.LoadTask,
    status=202,
    other_statuses=(200,),
    errors=(404, 503),
    example=Example({"modelId": "tiny-embed"}),
)
async def load_model(
    api: RunnerApi, body: types.RunnerLoad, request: Request, fields: Json, ignored: list[str]
) -> Response:
    """Load a model: a task.

    202, or 200 and `completed` for a loaded model. `maxContextLength` becomes an [override](#post-v1adminmodelsnameload) of the
    context (`n_ctx`, `max_model_len`), which lasts until an unload; a running worker with another context is replaced.
    `quantization` and `gpuMemoryBudgetMB` must be what the configuration says (a budget: no less than the model takes), else the
    request is refused with `not_configured_so`, as is a context that the runtime can't set. Other fields have no effect, and stand
    in `x-llmux-ignored`.

    With `server.allow_pull`, a model's missing files are fetched from its `source` first. An unload ends that; what has come is
    kept.
    """
    daemon = api.daemon
    model = model_of(daemon, body.model_id)
    await daemon.know_capabilities()
    lifecycle.check_quantization(daemon, model, body.quantization)
    victim = None if body.evict_model is None else model_of(daemon, body.evict_model, "evictModel")
    if victim == model:
        raise InvalidRequestError('"evictModel" is the model to be loaded.', param="evictModel")
    await _check_op_token(daemon, "model-load", request, fields, ignored)
    begin = partial(lifecycle.begin, daemon, model, body, victim)
    if await loading.may_pull(daemon, model):
        return _task_response(lifecycle.pull_task(daemon, daemon.pulls.begin(model, begin)))
    if (begun := await begin()) is not None:
        return _task_response(lifecycle.load_task(daemon, daemon.loads.view(begun)))
    if lifecycle.is_loaded(daemon, model):
        return _task_response(lifecycle.loaded_model_task(daemon, model), 200)
    return _task_response(lifecycle.model_task(daemon, model))


def _task_response(task: types.LoadTask, status: int = 202) -> Response:
    return Response(encode(task), status, media_type=JSON)


@GROUP.operation(
    "GET",
    TASKS + "load-{number}",
    errors=(404, 503),
    example=Example(
        path=TASKS + "load-1",
        needs="a load",
        answer=to_builtins(types.LoadTask("load-1", "completed", "qwen3-8b", 1.0, 0, 5120, 4200)),
    ),
)
async def get_load_task(api: RunnerApi, number: str) -> types.LoadTask:
    """How far a load is.

    `status` is `queued`, `loading`, `completed` or `failed`, which a cancelled load is, too. A completed one has
    `gpuMemoryUsedMB` and `loadTimeMs`, a failed one `error`. They are the [loads](#get-v1adminloads) of the admin API.
    """
    try:
        return lifecycle.load_task(api.daemon, api.daemon.loads.view(number))
    except NotFoundError:
        raise _no_task(f"load-{number}") from None


@GROUP.operation(
    "GET",
    TASKS + "pull-{number}",
    errors=(404, 503),
    example=Example(
        path=TASKS + "pull-1",
        needs="`server.allow_pull`",
        answer=to_builtins(
            types.LoadTask("pull-1", "loading", "qwen3-8b", 0.25, 90, bytes_done=1258291200, bytes_total=5033164800)
        ),
    ),
)
async def get_pull_task(api: RunnerApi, number: str) -> types.LoadTask:
    """How far a load is whose files are fetched first.

    It has `bytesDone` and `bytesTotal` meanwhile, and goes on as the load. It is `failed`, too, where llmux ended meanwhile: another
    load goes on from what has come.
    """
    if (pull := api.daemon.pulls.find(number)) is None:
        raise _no_task(f"pull-{number}")
    return lifecycle.pull_task(api.daemon, pull)


@GROUP.operation(
    "GET",
    TASKS + "model-{name:path}",
    errors=(404, 503),
    example=Example(path=TASKS + "model-tiny-embed-model"),
)
async def get_model_task(api: RunnerApi, name: str) -> types.LoadTask:
    """The task of a load that needed none, since the model was there, or came by another's load."""
    if name not in api.daemon.catalog.models:
        raise _no_task(f"model-{name}")
    return lifecycle.model_task(api.daemon, ModelId(name))


def _no_task(name: str) -> NotFoundError:
    return NotFoundError(f"There is no load task {name[:100]!r}.", code="task_not_found")


@GROUP.operation("POST", "/v1/models/unload", errors=(404, 503), example=Example({"modelId": "tiny-embed"}))
async def unload_model(
    api: RunnerApi, body: types.RunnerUnload, request: Request, fields: Json, ignored: list[str]
) -> types.Unloaded:
    """Unload a model; the answer comes when its worker has ended.

    The memory is what its workers were measured to take just before; where they can't be measured, what its devices have more
    after than before; null where neither can be told.
    """
    daemon = api.daemon
    model = model_of(daemon, body.model_id)
    await _check_op_token(daemon, "model-unload", request, fields, ignored)
    status = daemon.engine.model(model)
    had_worker = status is not None and status.has_worker and not status.spec.remote
    daemon.pulls.cancel(model)
    return types.Unloaded(model, await lifecycle.unload(daemon, model), had_worker)


@GROUP.operation(
    "POST", "/v1/cache/flush", errors=(404, 503), example=Example({"scope": "model", "modelId": "tiny-embed"})
)
async def flush_cache(
    api: RunnerApi, body: types.Flush, request: Request, fields: Json, ignored: list[str]
) -> types.Flushed:
    """Forget the prompts that workers keep.

    Of everybody, of one model, of one tenant, or of one tag; the last two may name a `modelId` to look at. `flushed` says whether
    nothing of it can be found again.
    """
    if (name := next((name for name in ignored if name in _NAMES), None)) is not None:
        raise InvalidRequestError(f'The scope {fields["scope"]} takes no "{name}": leave it out.', param=name)
    if isinstance(body, types.FlushTag):
        check_tag(body.tag.strip(), "tag")
    named = None if isinstance(body, types.FlushAll) else body.model_id
    only = model_of(api.daemon, named) if isinstance(named, str) else None
    await _check_op_token(api.daemon, "cache-flush", request, fields, ignored)
    return await flush.flush(api.daemon, body, only)


async def _check_op_token(daemon: Daemon, operation: str, request: Request, fields: Json, ignored: list[str]) -> None:
    """Raises ForbiddenError unless `verifiedOpToken` proves that the required parties agreed to all fields of the request.

    The error has the reason only for a client with an API key: without keys, anybody on this machine could try tokens.
    """
    rest = {name: value for name, value in fields.items() if name != FIELD}
    token, governance = fields.get(FIELD), daemon.catalog.server.governance
    if governance is not None:
        has_key = request.scope.get("state", {}).get(KEY) is not None
        await daemon.op_tokens.check(governance, token, operation, rest, time.time(), names_reason=has_key)
    elif token is not None:
        ignored.append(FIELD)
