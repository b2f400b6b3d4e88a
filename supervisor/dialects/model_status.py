"""A model's state in llama.cpp's terms, for clients of llama.cpp and OpenAI: unloaded, loading, loaded, failed."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon.daemon import Daemon
from supervisor.engine.status import ModelFigures
from supervisor.engine.status import ModelStatus as EngineStatus

Status = Literal["unloaded", "loading", "loaded", "failed"]


class ModelStatus(Struct):
    """A model's state, with the cause of a failure."""

    value: Status
    failed: bool | UnsetType = UNSET
    exit_code: int | UnsetType | None = UNSET
    reason: str | UnsetType = UNSET


def status_view(daemon: Daemon, model: ModelId) -> ModelStatus:
    """The `status` of a model in lists."""
    found = daemon.engine.figures_of(model)
    value = status(found)
    if value != "failed" or found is None or found.crash is None:
        return ModelStatus(value)
    return ModelStatus(value, True, found.crash.exit_code, found.crash.summary)


def status(found: EngineStatus | ModelFigures | None) -> Status:
    """The model's state in llama.cpp's terms."""
    if found is None:
        return "unloaded"
    match found.state:
        case WorkerState.READY | WorkerState.DRAINING:
            return "loaded" if found.answering else "loading"
        case WorkerState.STARTING | WorkerState.BACKOFF:
            return "loading"
        case WorkerState.FAILED:
            return "failed"
        case WorkerState.STOPPED | WorkerState.STOPPING:
            return "loading" if found.is_wanted else "unloaded"
