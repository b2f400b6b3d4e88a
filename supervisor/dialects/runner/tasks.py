"""The task of a load, as clients see it.

It is one of the daemon's loads (`supervisor.daemon.loads`), called `load-NUMBER`. Where a model needs none, because it is loaded
or somebody else runs it, the task is the model itself: `model-ID`. Where its files have to come first, and clients may have them
fetched, it is `pull-NUMBER`, which goes on as the load that follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec.structs import replace

from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.pulls import Pull
from supervisor.dialects.runner.models import memory_of
from supervisor.dialects.runner.types import LoadTask
from supervisor.errors import UnavailableError
from supervisor.schema.load import Load

_PULL_SHARE: Final = 0.9
"""Of the progress of a task that fetches files first."""
_STATES: Final[Mapping[str, Literal["queued", "loading", "completed"]]] = {
    "waiting": "queued",
    "loading": "loading",
    "ready": "completed",
}


def pull_progress(pull: Pull) -> float:
    """Of a load whose files come first, as long as they do."""
    return round(_PULL_SHARE * pull.share, 3)


def of_pull(daemon: Daemon, pull: Pull) -> LoadTask:
    """While the files come, and then the load that follows."""
    task = LoadTask(f"pull-{pull.id}", "queued" if pull.state == "queued" else "loading", pull.model)
    if pull.state == "failed":
        return replace(task, status="failed", error=pull.error, load_time_ms=_ms(pull.took_s))
    if pull.state == "done":
        load = of_model(daemon, pull.model) if pull.load is None else of_load(daemon, daemon.loads.view(pull.load))
        progress = round(_PULL_SHARE + (1 - _PULL_SHARE) * load.progress, 3)
        return replace(load, task_id=task.task_id, progress=progress)
    return replace(
        task,
        progress=pull_progress(pull),
        eta=pull.eta_s,
        bytes_done=pull.done_bytes,
        bytes_total=pull.total_bytes,
    )


def of_load(daemon: Daemon, load: Load) -> LoadTask:
    """One of the daemon's loads."""
    task = LoadTask(f"load-{load.id}", _STATES.get(load.state, "failed"), load.model, load.progress, load.eta_s)
    if task.status == "completed":
        status = daemon.engine.model(ModelId(load.model))
        memory = memory_of(status) if status is not None and status.answering else None
        used_mib = load.memory_mib if memory is None else memory
        return replace(task, eta=0, gpu_memory_used_mb=used_mib, load_time_ms=_ms(load.took_s))
    if task.status == "failed":
        return replace(task, error=load.reason or load.state, load_time_ms=_ms(load.took_s))
    return task


def of_model(daemon: Daemon, model: ModelId) -> LoadTask:
    """Of a model that needs no load of its own. Raises UnavailableError."""
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


def of_loaded(daemon: Daemon, model: ModelId) -> LoadTask:
    """Of a model that is loaded: its last load, if that is known."""
    load = daemon.loads.last(model)
    return of_model(daemon, model) if load is None or load.state != "ready" else of_load(daemon, load)


def _ms(took_s: float | None) -> int | None:
    return None if took_s is None else round(took_s * 1000)
