"""`/v1/models/load` and `/v1/models/unload`.

A load is one of the daemon's load tasks (`supervisor.daemon.loads`), called `load-NUMBER`. Where a model needs none, because
it is loaded or somebody else runs it, the task is the model itself: `model-ID`. Where its files have to come first, and
clients may have them fetched, it is `pull-NUMBER`, which goes on as the load that follows.

Of what a request says about how to load a model, the longest context becomes an override, which ends with an unload. The
rest is checked against the configuration, and refused where that differs: a client must not be told that it changed what
it didn't. Where `server.governance` is configured, `verifiedOpToken` must say who agreed to the request, besides the scope
of its key. Every other field has no effect.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.core.events import UnloadAsked
from supervisor.core.types import DeviceId, ModelId, ModelSpec, WorkerState
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.job import KEY
from supervisor.daemon.op_tokens import FIELD
from supervisor.daemon.pulls import Pull
from supervisor.dialects.runner.models import (
    context_of,
    is_same_quantization,
    memory_of,
    model_of,
    quantization_of,
)
from supervisor.errors import InvalidRequestError, NotFoundError, UnavailableError
from supervisor.gateway.body.parameters import json_object
from supervisor.gateway.filters.translation import ignored_header
from supervisor.schema.load import Load

TASKS: Final = "/v1/models/load/"
_LOAD, _PULL, _MODEL = "load-", "pull-", "model-"
_TASK: Final = re.compile(rf"{TASKS}(?:(?:{_LOAD}|{_PULL})[^/]+|{_MODEL}.+)", re.DOTALL)
_MOST: Final = (1 << 31) - 1
_PULL_SHARE: Final = 0.9
"""Of the progress of a task that fetches files first."""
_STATES: Final[Mapping[str, str]] = {"waiting": "queued", "loading": "loading", "ready": "completed"}

Json = dict[str, JsonValue]


def is_task(path: str) -> bool:
    """Is it the path of a task? Others below TASKS are those of models whose names begin with `load/`."""
    return _TASK.fullmatch(path) is not None


def routes(daemon: Daemon) -> list[Route]:
    """`POST /v1/models/load`, `GET /v1/models/load/{task}`, `POST /v1/models/unload`."""

    async def load(request: Request) -> Response:
        fields = await json_object(request)
        asked = dict(fields)
        model = model_of(daemon, fields.pop("modelId", None), "modelId")
        await daemon.know_capabilities()
        _check_quantization(daemon, model, fields)
        longest, most_mib = _count(fields, "maxContextLength"), _count(fields, "gpuMemoryBudgetMB")
        evicted, victim = fields.pop("evictModel", None), None
        if evicted is not None:
            victim = model_of(daemon, evicted, "evictModel")
            if victim == model:
                raise InvalidRequestError('"evictModel" is the model to be loaded.', param="evictModel")
        await agree(daemon, request, "model-load", asked, fields)
        begin = partial(_begin, daemon, model, longest, most_mib, victim)
        if await loading.may_pull(daemon, model):
            return answer(_of_pull(daemon, daemon.pulls.begin(model, begin)), fields, status=202)
        begun = await begin()
        status = daemon.engine.model(model)
        if begun is None and status is not None and status.answering and status.state is WorkerState.READY:
            return answer(_loaded(daemon, model), fields)
        started = _of_model(daemon, model) if begun is None else _of_load(daemon, daemon.loads.view(begun))
        return answer(started, fields, status=202)

    async def load_task(request: Request) -> Response:
        try:
            return JSONResponse(_of_load(daemon, daemon.loads.view(request.path_params["number"])))
        except NotFoundError:
            raise _no_task(request) from None

    async def pull_task(request: Request) -> Response:
        if (pull := daemon.pulls.find(request.path_params["number"])) is None:
            raise _no_task(request)
        return JSONResponse(_of_pull(daemon, pull))

    async def model_task(request: Request) -> Response:
        if (model := request.path_params["name"]) not in daemon.catalog.models:
            raise _no_task(request)
        return JSONResponse(_of_model(daemon, ModelId(model)))

    async def unload(request: Request) -> Response:
        fields = await json_object(request)
        asked = dict(fields)
        model = model_of(daemon, fields.pop("modelId", None), "modelId")
        await agree(daemon, request, "model-unload", asked, fields)
        status = daemon.engine.model(model)
        had_worker = status is not None and status.has_worker and not status.spec.remote
        daemon.pulls.cancel(model)
        freed = await unloaded(daemon, model)
        told: Json = {"modelId": model, "gpuMemoryFreedMB": freed, "kvCacheFlushed": had_worker}
        return answer(told, fields)

    return [
        Route("/v1/models/load", load, methods=["POST"]),
        Route("/v1/models/load/load-{number}", load_task, methods=["GET"]),
        Route("/v1/models/load/pull-{number}", pull_task, methods=["GET"]),
        Route("/v1/models/load/model-{name:path}", model_task, methods=["GET"]),
        Route("/v1/models/unload", unload, methods=["POST"]),
    ]


async def agree(daemon: Daemon, request: Request, operation: str, asked: Json, left: Json) -> None:
    """Raises ForbiddenError unless those who must agreed to all that is `asked`; with the token taken out of `left`.

    Only who has shown an API key is told why not: where there are none, anybody on this machine could try tokens.
    """
    governance = daemon.catalog.server.governance
    if governance is None:
        return
    left.pop(FIELD, None)
    token = asked.pop(FIELD, None)
    has_key = request.scope.get("state", {}).get(KEY) is not None
    await daemon.op_tokens.check(governance, token, operation, asked, time.time(), tells_why=has_key)


async def unloaded(daemon: Daemon, model: ModelId, order: UnloadAsked | None = None) -> int | None:
    """Unload the model, as in `order`, else for good; what its workers were just measured to take, in MiB, all of which their end frees.

    Where they can't be measured, what their devices have more after than before. None: neither can be told.
    Raises UnavailableError.
    """
    await daemon.engine.sample()
    status = daemon.engine.model(model)
    if status is None or not status.has_worker:
        await loading.unload(daemon, model, force=False)  # it may be wanted
        return 0
    before, taken = _free(daemon, status.devices), [lease.measured_mib for lease in status.leases]
    if order is not None:
        await daemon.engine.unload(model, None, order)
    else:
        await loading.unload(daemon, model, force=False)
    if None not in taken:
        return sum(mib or 0 for mib in taken)
    await daemon.engine.sample()
    after = _free(daemon, status.devices)
    if before is None or after is None or after < before:  # somebody else took it at once
        return None
    return after - before


def _free(daemon: Daemon, devices: tuple[DeviceId, ...]) -> int | None:
    free = [device.totals.free_mib for device in daemon.engine.devices() if device.id in devices]
    known = [mib for mib in free if mib is not None]
    return sum(known) if free and len(known) == len(free) else None


def _check_quantization(daemon: Daemon, model: ModelId, fields: Json) -> None:
    """Takes it out of `fields`. Raises InvalidRequestError where another one is configured."""
    if (wanted := fields.pop("quantization", None)) is not None:
        if not isinstance(wanted, str):
            raise InvalidRequestError('"quantization" must be a text such as "awq-4bit".', param="quantization")
        known = quantization_of(daemon.fleet.effective(model))
        if known is None or not is_same_quantization(wanted, known):
            raise _refused("quantization", model, known)


async def _begin(
    daemon: Daemon, model: ModelId, longest: int | None, most_mib: int | None, victim: ModelId | None
) -> str | None:
    """Begin to load it; the number of the load. None: it needs none. Raises InvalidRequestError, UnavailableError."""
    if model not in daemon.catalog.models:
        raise UnavailableError(f"{model} was taken out of the configuration.")
    if daemon.engine.queue().is_stopping:
        raise UnavailableError("llmux is shutting down.", code="shutting_down", retry_after_s=5.0)
    await daemon.know_capabilities()
    await _set_context(daemon, model, longest, most_mib)
    if victim is not None and victim in daemon.catalog.models:
        loading.ask_unload(daemon, victim)
    status = daemon.engine.model(model)
    if status is not None and status.answering and status.state is WorkerState.READY:
        return None
    before = daemon.loads.last(model)
    loading.ask_load(daemon, model)
    load = daemon.loads.current(model) or daemon.loads.last(model)
    is_new = load is not None and (before is None or load.id != before.id)
    return load.id if load is not None and is_new else None


async def _set_context(daemon: Daemon, model: ModelId, longest: int | None, most_mib: int | None) -> None:
    """Let a request of it have so many tokens, within so much memory. Raises InvalidRequestError where that can't be."""
    configured, status = daemon.fleet.effective(model), daemon.engine.model(model)
    if longest is None or context_of(configured) == longest:
        if status is not None:
            _check_budget(daemon, most_mib, status.spec, memory_of(status) or 0)
        return
    settings = configured.adapter.context_settings(configured.config, longest)
    if not settings:
        raise _refused("maxContextLength", model, context_of(configured))
    try:
        await loading.override(daemon, model, settings, partial(_check_budget, daemon, most_mib))
    except InvalidRequestError as error:
        message = f"{model} can't be loaded with maxContextLength {longest}: {error.message}"
        raise InvalidRequestError(message, code=error.code, param="maxContextLength") from error


def _check_budget(daemon: Daemon, most_mib: int | None, spec: ModelSpec, taken_mib: int = 0) -> None:
    """Raises InvalidRequestError for a model that needs, or has taken, more memory than that."""
    if most_mib is None:
        return
    if spec.remote:
        raise _refused("gpuMemoryBudgetMB", spec.id, None)
    devices = [device.spec for device in daemon.engine.devices() if not spec.devices or device.id in spec.devices]
    need_mib = max([device.need(spec).mib * (1 if device.takes_whole else spec.gpus) for device in devices], default=0)
    if max(need_mib, taken_mib) > most_mib:
        raise _refused("gpuMemoryBudgetMB", spec.id, f"{max(need_mib, taken_mib)} MiB")


def _refused(field: str, model: ModelId, known: object) -> InvalidRequestError:
    said = "doesn't say" if known is None else f"says {known}"
    return InvalidRequestError(
        f"{model}: {field} is fixed by its configuration, which {said}. Leave it out, or change the configuration.",
        code="not_configured_so",
        param=field,
    )


def _count(fields: Json, name: str) -> int | None:
    value = fields.pop(name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
        raise InvalidRequestError(f'"{name}" must be a whole number from 1 to {_MOST}.', param=name)
    return value


# ----------------------------------------------------------------------------------------------------------------- views


def _no_task(request: Request) -> NotFoundError:
    name = request.url.path.removeprefix(TASKS)
    return NotFoundError(f"There is no load task {name[:100]!r}.", code="task_not_found")


def pull_progress(pull: Pull) -> float:
    """Of a load whose files come first, as long as they do."""
    return round(_PULL_SHARE * pull.share, 3)


def _of_pull(daemon: Daemon, pull: Pull) -> Json:
    """While its files come, and then as the load that it began."""
    view: Json = {"taskId": f"{_PULL}{pull.id}", "modelId": pull.model}
    if pull.state == "failed":
        took_ms = None if pull.took_s is None else round(pull.took_s * 1000)
        return view | {"status": "failed", "progress": 0.0, "eta": None, "error": pull.error, "loadTimeMs": took_ms}
    if pull.state == "done":
        of_load = _of_model(daemon, pull.model) if pull.load is None else _of_load(daemon, daemon.loads.view(pull.load))
        share = of_load["progress"]
        assert isinstance(share, int | float)
        return of_load | view | {"progress": round(_PULL_SHARE + (1 - _PULL_SHARE) * share, 3)}
    pulling: Json = {
        "status": "queued" if pull.state == "queued" else "loading",
        "progress": pull_progress(pull),
        "eta": pull.eta_s,
        "bytesDone": pull.done_bytes,
        "bytesTotal": pull.total_bytes,
    }
    return view | pulling


def _of_load(daemon: Daemon, load: Load) -> Json:
    """One of the daemon's load tasks."""
    state = _STATES.get(load.state, "failed")
    model = ModelId(load.model)
    view: Json = {
        "taskId": f"{_LOAD}{load.id}",
        "status": state,
        "modelId": model,
        "progress": load.progress,
        "eta": 0 if state == "completed" else load.eta_s,
    }
    if state == "completed":
        status = daemon.engine.model(model)
        memory = memory_of(status) if status is not None and status.answering else None
        return view | {
            "gpuMemoryUsedMB": load.memory_mib if memory is None else memory,
            "loadTimeMs": _took_ms(load),
        }
    if state == "failed":
        return view | {"error": load.reason or load.state, "loadTimeMs": _took_ms(load)}
    return view


def _took_ms(load: Load) -> int | None:
    return None if load.took_s is None else round(load.took_s * 1000)


def _loaded(daemon: Daemon, model: ModelId) -> Json:
    """Of a model that is loaded: by its last load, if that is known."""
    load = daemon.loads.last(model)
    return _of_model(daemon, model) if load is None or load.state != "ready" else _of_load(daemon, load)


def _of_model(daemon: Daemon, model: ModelId) -> Json:
    status = daemon.engine.model(model)
    if status is None:
        raise UnavailableError(f"{model} was taken out of the configuration.")
    view: Json = {"taskId": f"{_MODEL}{model}", "modelId": model, "progress": 0.0, "eta": status.eta_s}
    if status.answering:
        loaded: Json = {"progress": 1.0, "eta": 0, "gpuMemoryUsedMB": memory_of(status), "loadTimeMs": None}
        return view | {"status": "completed"} | loaded
    if status.state is WorkerState.FAILED or not (status.has_worker or status.is_wanted):
        return view | {"status": "failed", "error": status.reason or "it is not loaded"}
    return view | {"status": "loading" if status.has_worker else "queued"}


def answer(view: Json, left: Json, status: int = 200) -> Response:
    """`left`: the fields of the request that have no effect."""
    return JSONResponse(view, status, {"x-llmux-ignored": ignored_header([*left])} if left else None)
