"""A model's state in llama.cpp's words, which clients of both dialects read: unloaded, loading, loaded, failed."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon.daemon import Daemon
from supervisor.engine.status import ModelFigures, ModelStatus

Json = dict[str, JsonValue]
Status = Literal["unloaded", "loading", "loaded", "failed"]


def status_view(daemon: Daemon, model: ModelId) -> Json:
    """A model's `status`, with the cause of a failure."""
    found = daemon.engine.figures_of(model)
    value = status(found)
    if value != "failed" or found is None or found.crash is None:
        return {"value": value}
    return {"value": value, "failed": True, "exit_code": found.crash.exit_code, "reason": found.crash.summary}


def status(found: ModelStatus | ModelFigures | None) -> Status:
    """A model's state in llama.cpp's words."""
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
