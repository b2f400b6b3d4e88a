"""The daemon's health, in a model runner's terms: healthy, or the reason why it can't take requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from supervisor.core.types import CrashClass, WorkerState
from supervisor.schema.daemon import Trouble

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon


_CRASHED = frozenset({WorkerState.BACKOFF, WorkerState.FAILED})


def lifetime(daemon: Daemon) -> Literal["starting", "stopping"] | None:
    """Is the daemon starting or stopping? It starts until the memory of every device was read once. None: neither."""
    if daemon.engine.queue().is_stopping:
        return "stopping"
    is_read = all(device.totals.free_mib is not None for device in daemon.engine.devices())
    return None if is_read else "starting"


def trouble(daemon: Daemon) -> Trouble | None:
    """Why the daemon can't take requests now; None: it can."""
    if (phase := lifetime(daemon)) is not None:
        return phase
    models, queue = daemon.engine.figures(), daemon.engine.queue()
    crashed = [model for model in models if model.state in _CRASHED]
    if any(model.crash is not None and model.crash.kind is CrashClass.OUT_OF_MEMORY for model in crashed):
        return "gpu_oom"
    if models and all(model.state is WorkerState.FAILED for model in models):
        return "all_models_failed"
    return "queue_full" if queue.waiting >= queue.most else None
