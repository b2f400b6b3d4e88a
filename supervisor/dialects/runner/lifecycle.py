"""Loads, as tasks, and unloads.

A task is a load of the daemon (`supervisor.jobs.loads`): `load-NUMBER`. A model that needs no load (it is loaded, or another
program runs it) is its own task: `model-ID`. If files are missing and clients may fetch them, the task is `pull-NUMBER`, which
continues as the load that follows.

The longest context in a request becomes an override until the next unload. All other settings in a request must fit the
configuration; llmux refuses others, so that no client believes that it changed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, Literal

from msgspec.structs import replace

from supervisor.core.events import UnloadRequested
from supervisor.core.types import DeviceId, ModelId, ModelSpec, WorkerState
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.runner.models import context_of, is_same_quantization, memory_of, quantization_of
from supervisor.dialects.runner.types import LoadTask, RunnerLoad
from supervisor.errors import InvalidRequestError, UnavailableError
from supervisor.jobs.job import Pull
from supervisor.jobs.pulls import progress_of, took_s, trouble_of
from supervisor.schema.load import Load

_PULL_SHARE: Final = 0.9
"""The share of the files in the progress of a task that fetches files first."""
_STATES: Final[Mapping[str, Literal["queued", "loading", "completed"]]] = {
    "waiting": "queued",
    "loading": "loading",
    "ready": "completed",
}


def is_loaded(daemon: Daemon, model: ModelId) -> bool:
    """Whether the model is loaded and not about to be unloaded."""
    status = daemon.engine.model(model)
    return status is not None and status.answering and status.state is WorkerState.READY


async def begin(daemon: Daemon, model: ModelId, body: RunnerLoad, victim: ModelId | None) -> str | None:
    """Begin to load a model. Returns the load's number; None: no new load is needed. Raises InvalidRequestError, UnavailableError."""
    if model not in daemon.catalog.models:
        raise UnavailableError(f"{model} was taken out of the configuration.")
    if daemon.engine.queue().is_stopping:
        raise UnavailableError("llmux is shutting down.", code="shutting_down", retry_after_s=5.0)
    await daemon.know_capabilities()
    await _set_context(daemon, model, body.max_context_length, body.gpu_memory_budget_mb)
    if victim is not None and victim in daemon.catalog.models:
        loading.ask_unload(daemon, victim)
    if is_loaded(daemon, model):
        return None
    before = daemon.loads.last(model)
    loading.ask_load(daemon, model)
    load = daemon.loads.current(model) or daemon.loads.last(model)
    is_new = load is not None and (before is None or load.id != before.id)
    return load.id if load is not None and is_new else None


async def unload(daemon: Daemon, model: ModelId, order: UnloadRequested | None = None) -> int | None:
    """Unload the model, by `order` or like an operator. Returns the MiB that its workers took just before: their end frees all of it.

    If these can't be measured, returns the growth of their devices' free memory. None: neither is known.
    Raises UnavailableError.
    """
    await daemon.engine.sample()
    status = daemon.engine.model(model)
    if status is None or not status.has_worker:
        await loading.unload(daemon, model, force=False)  # a load of it may be pending
        return 0
    before, taken = _free_mib(daemon, status.devices), total(lease.measured_mib for lease in status.leases)
    if order is not None:
        await daemon.engine.unload(model, None, order)
    else:
        await loading.unload(daemon, model, force=False)
    if taken is not None:
        return taken
    await daemon.engine.sample()
    after = _free_mib(daemon, status.devices)
    if before is None or after is None or after < before:  # another program took the memory at once
        return None
    return after - before


def _free_mib(daemon: Daemon, devices: tuple[DeviceId, ...]) -> int | None:
    free = [device.totals.free_mib for device in daemon.engine.devices() if device.id in devices]
    return total(free) if free else None


def total(parts: Iterable[int | None]) -> int | None:
    """The sum; None where a part isn't known."""
    known = [*parts]
    return None if None in known else sum(part or 0 for part in known)


def check_quantization(daemon: Daemon, model: ModelId, wanted: str | None) -> None:
    """Raises InvalidRequestError if the model is configured with another quantization."""
    if wanted is None:
        return
    known = quantization_of(daemon.fleet.effective(model))
    if known is None or not is_same_quantization(wanted, known):
        raise _not_configured_error("quantization", model, known)


async def _set_context(daemon: Daemon, model: ModelId, longest: int | None, most_mib: int | None) -> None:
    """Override the context length (`longest` tokens) within `most_mib`. Raises InvalidRequestError if that isn't possible."""
    configured, status = daemon.fleet.effective(model), daemon.engine.model(model)
    if longest is None or context_of(configured) == longest:
        if status is not None:
            _check_budget(daemon, most_mib, status.spec, memory_of(status) or 0)
        return
    settings = configured.adapter.context_settings(configured.config, longest)
    if not settings:
        raise _not_configured_error("maxContextLength", model, context_of(configured))
    try:
        await loading.override(daemon, model, settings, partial(_check_budget, daemon, most_mib))
    except InvalidRequestError as error:
        message = f"{model} can't be loaded with maxContextLength {longest}: {error.message}"
        raise InvalidRequestError(message, code=error.code, param="maxContextLength") from error


def _check_budget(daemon: Daemon, most_mib: int | None, spec: ModelSpec, taken_mib: int = 0) -> None:
    """Raises InvalidRequestError for a model that needs, or has taken, more memory than `most_mib`."""
    if most_mib is None:
        return
    if spec.remote:
        raise _not_configured_error("gpuMemoryBudgetMB", spec.id, None)
    devices = [device.spec for device in daemon.engine.devices() if not spec.devices or device.id in spec.devices]
    need_mib = max([device.need(spec).mib * (1 if device.takes_whole else spec.gpus) for device in devices], default=0)
    if max(need_mib, taken_mib) > most_mib:
        raise _not_configured_error("gpuMemoryBudgetMB", spec.id, f"{max(need_mib, taken_mib)} MiB")


def _not_configured_error(field: str, model: ModelId, known: object) -> InvalidRequestError:
    found = "doesn't say" if known is None else f"says {known}"
    return InvalidRequestError(
        f"{model}: {field} is fixed by its configuration, which {found}. Leave it out, or change the configuration.",
        code="not_configured_so",
        param=field,
    )


# ----------------------------------------------------------------------------------------------------------------- tasks


def pull_progress(pull: Pull) -> float:
    """The progress of a load task while it fetches the model's files, from 0 to 1."""
    return round(_PULL_SHARE * (progress_of(pull).share or 0.0), 3)


def pull_task(daemon: Daemon, pull: Pull) -> LoadTask:
    """The task of a load that fetches files first: of the pull, then of the load that follows."""
    task = LoadTask(pull.id, "queued" if pull.state == "queued" else "loading", pull.model)
    if pull.state == "completed":
        number = None if pull.load is None else pull.load.removeprefix("load-")
        load = model_task(daemon, pull.model) if number is None else load_task(daemon, daemon.loads.view(number))
        progress = round(_PULL_SHARE + (1 - _PULL_SHARE) * load.progress, 3)
        return replace(load, task_id=task.task_id, progress=progress)
    if pull.is_over:
        return replace(task, status="failed", error=trouble_of(pull), load_time_ms=_to_ms(took_s(pull)))
    return replace(
        task,
        progress=pull_progress(pull),
        eta=progress_of(pull).eta_s,
        bytes_done=pull.done_bytes,
        bytes_total=pull.total_bytes,
    )


def load_task(daemon: Daemon, load: Load) -> LoadTask:
    """The task of a load of the daemon."""
    task = LoadTask(f"load-{load.id}", _STATES.get(load.state, "failed"), load.model, load.progress, load.eta_s)
    if task.status == "completed":
        status = daemon.engine.model(ModelId(load.model))
        memory = memory_of(status) if status is not None and status.answering else None
        used_mib = load.memory_mib if memory is None else memory
        return replace(task, eta=0, gpu_memory_used_mb=used_mib, load_time_ms=_to_ms(load.took_s))
    if task.status == "failed":
        return replace(task, error=load.reason or load.state, load_time_ms=_to_ms(load.took_s))
    return task


def model_task(daemon: Daemon, model: ModelId) -> LoadTask:
    """The task of a model that needs no load of its own. Raises UnavailableError."""
    status = daemon.engine.model(model)
    if status is None:
        raise UnavailableError(f"{model} was taken out of the configuration.")
    task = LoadTask(f"model-{model}", "loading" if status.has_worker else "queued", model, eta=status.eta_s)
    if status.answering:
        used_mib = memory_of(status)
        return replace(task, status="completed", progress=1.0, eta=0, gpu_memory_used_mb=used_mib, load_time_ms=None)
    if status.state is WorkerState.FAILED or not (status.has_worker or status.is_wanted):
        return replace(task, status="failed", error=status.reason or "it is not loaded")
    return task


def loaded_model_task(daemon: Daemon, model: ModelId) -> LoadTask:
    """The task of a loaded model: its last load, if that is known."""
    load = daemon.loads.last(model)
    return model_task(daemon, model) if load is None or load.state != "ready" else load_task(daemon, load)


def _to_ms(took_s: float | None) -> int | None:
    return None if took_s is None else round(took_s * 1000)
