"""Loads of models."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from supervisor.schema.operation import doc

_WHEN = "Seconds since 1970; null: not yet."
_BYTES = "Of the model's files; null: unknown."
State = Literal["waiting", "loading", "ready", "failed", "cancelled", "interrupted"]


class Load(Struct, gc=False):
    """A load of a model's worker."""

    id: Annotated[str, doc("Its number; numbers grow, also over restarts.")]
    model: Annotated[str, doc("The model as it is configured.")]
    worker: Annotated[str, doc("The model, or one of its replicas.")]
    generation: Annotated[int | None, doc("Of the worker, once it is started; null before.")]
    state: Annotated[
        State,
        doc(
            "`waiting` for memory, a turn or a retry, `loading`; then `ready`, `failed`, `cancelled` or `interrupted`."
        ),
    ]
    reason: Annotated[str | None, doc("Why it waits, was begun, or ended.")]
    asked_at: Annotated[float, doc(_WHEN)]
    started_at: Annotated[float | None, doc(_WHEN)]
    ended_at: Annotated[float | None, doc(_WHEN)]
    waited_s: Annotated[float, doc("Seconds until its worker was started, or until now.")]
    took_s: Annotated[float | None, doc("Seconds from the start of its worker to the end, or until now.")]
    expected_s: Annotated[float | None, doc("How long the model's last load took; null before the first.")]
    eta_s: Annotated[float | None, doc("How much longer it takes; null where nobody can say.")]
    progress: Annotated[
        float,
        doc(
            "How much is done, from 0 to 1: the greatest of the shares of bytes read, of memory, and of the log's own figure."
        ),
    ]
    stage: Annotated[str | None, doc("The last line of its worker's log while it loads.")]
    bytes_read: Annotated[int | None, doc(_BYTES)]
    bytes_total: Annotated[int | None, doc(_BYTES)]
    memory_mib: Annotated[int | None, doc("Memory that it takes so far.")]
    lease_mib: Annotated[int | None, doc("Memory that it may take.")]
    devices: Annotated[list[str], doc("Where it takes it.")]


class LoadEstimates(Struct, gc=False):
    """How far the expected times of loads were from the real ones."""

    loads: int
    mean_error_s: float | None
    mean_error: float | None


class LoadList(Struct):
    """Loads, the newest first."""

    object: Literal["list"]
    data: list[Load]
    estimates: LoadEstimates
