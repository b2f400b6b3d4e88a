"""Loads of models as jobs: the open ones with their progress, and the most recent ended ones. They survive restarts.

A load begins when a model is wanted but not loaded. It ends when the model is loaded, when it has failed, or when nobody wants
the model any more. Each try is a load of its own, and so is each replica. A load that was open when the daemon ended is
interrupted. The state of an ended load follows from the first of the scheduler's decisions about it that ends loads.

Progress is the greatest of three shares: bytes read of the weights, memory taken of the lease, and the progress in the last
line of the worker's log. It never falls, and stays below 1 until the model is loaded. The remaining time is based on the
duration of the model's last load. Without one, or after that time, it is based on the progress, until all weights are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import structlog

from runtimes.base import ModelUnusableError
from supervisor.catalog import CatalogModel
from supervisor.core.effects import Decided, Effect
from supervisor.core.events import Event, LoadCancelled, LoadRequested, RequestArrived, RequestFinished, UnloadRequested
from supervisor.core.types import SERVES, ModelId, WorkerState, base_of
from supervisor.engine.engine import Engine
from supervisor.engine.events import Hub
from supervisor.engine.status import LoadStatus
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.fleet.fleet import Fleet
from supervisor.jobs.job import Load, number_of
from supervisor.jobs.jobs import Jobs, Kind, Progress
from supervisor.schema import load as schema
from supervisor.schema.job import State

log = structlog.get_logger("llmux.loads")

KEPT: Final = 100
"""The most ended loads that are kept."""
LOOK_S: Final = 1.0
MOST_SHARE: Final = 0.99
"""The greatest progress of a load that isn't over."""
LEAST_SHARE: Final = 0.05
"""The least progress from which the remaining time is estimated. At `MOST_SHARE` all is read, and the rest can't be measured."""
_INTERRUPTED: Final = "llmux ended, or another daemon took over, before the model was loaded"
_UNWANTED: Final = "nobody waits for it any more"

_ENDS: Final[Mapping[str, State]] = {
    "crash": "failed",
    "failed": "failed",
    "refuse": "failed",
    "give_up": "failed",
    "cancel": "cancelled",
    "stop": "cancelled",
    "evicted": "cancelled",
    "leave": "cancelled",
}
"""The kinds of decisions that end a load, and its state then."""


class Loads:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, engine: Engine, fleet: Fleet, hub: Hub, jobs: Jobs) -> None:
        self._engine = engine
        self._fleet = fleet
        self._hub = hub
        self._jobs = jobs
        self._open: dict[ModelId, Load] = {}  # by worker
        self._last_number = 0  # number of the newest load
        self._watcher: asyncio.Task[None] | None = None  # set while a load is open
        jobs.kinds[Load] = Kind(self._cancel, progress_of, KEPT)
        engine.observers.append(self.observe)

    def restore(self) -> None:
        """Mark stored loads that weren't over as interrupted. Call it once, before the engine's first event."""
        for load in self._jobs.of(Load):
            self._last_number = max(self._last_number, number_of(load))
            if not load.is_over:
                load.state, load.reason, load.ended_at = "interrupted", _INTERRUPTED, round(time.time(), 3)
                self._save(load)

    # ----------------------------------------------------------------------------------------------------------- events

    def observe(self, event: Event, effects: Sequence[Effect]) -> None:
        """See `engine.Observer`."""
        kind = type(event)
        about = {effect.model for effect in effects if type(effect) is Decided and effect.model is not None}
        if isinstance(event, RequestArrived | LoadRequested):
            about.add(event.model)
        if kind is not RequestArrived and kind is not RequestFinished:
            about.update(self._open)
        unloaded = base_of(event.model) if type(event) is UnloadRequested else None
        for model in about:
            self._update(model, "unloaded by an operator" if base_of(model) == unloaded else _UNWANTED)

    def _update(self, model: ModelId, default_reason: str = _UNWANTED) -> None:
        """Begin, start or end the model's load by its present status. `default_reason`: of an end without a decision."""
        status, load = self._engine.load_status(model), self._open.get(model)
        if status is not None and status.is_remote:
            status = None
        if load is not None and _has_ended(load, status):
            self._finish(load, status, default_reason)
            load = None
        if status is None or not (status.is_wanted or status.state is WorkerState.STARTING):
            return
        load = load or self._begin_load(model)
        if status.state is WorkerState.STARTING and load.state == "queued":
            self._note_start(load, status)
        elif load.state == "queued":
            load.reason = next(self._decisions(load), (0, "", load.reason))[2]

    def _begin_load(self, model: ModelId) -> Load:
        self._last_number += 1
        made = self._engine.decisions(model, limit=1)
        now = round(time.time(), 3)
        load = Load(id=f"load-{self._last_number}", created_at=now, model=base_of(model), worker=model)
        self._open[model] = load
        self._jobs.add(load)
        if made:
            load.decided, load.reason = made[-1].seq, made[-1].reason if made[-1].model == model else ""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="loads")
        self._note_state(load)
        return load

    def _note_start(self, load: Load, status: LoadStatus) -> None:
        load.state = "running"
        load.decided, _, load.reason = next(self._decisions(load), (load.decided, "", load.reason))
        load.started_at = max(load.created_at, round(time.time() - status.since_s, 3))
        load.generation, load.devices = status.generation, status.devices
        load.lease_mib, load.expected_s = status.lease_mib, status.load_s
        self._note_state(load)

    def _finish(self, load: Load, status: LoadStatus | None, default_reason: str) -> None:
        del self._open[load.worker]
        load.ended_at = round(time.time(), 3)
        ends = [(kind, reason) for _, kind, reason in self._decisions(load) if kind in _ENDS]
        if load.started_at is not None:
            load.took_s = round(load.ended_at - load.started_at, 3)
        if status is not None and status.state in SERVES and load.generation in {None, status.generation}:
            load.state, load.reason, load.share = "completed", status.reason, 1.0
            load.took_s = status.load_s
        elif self._engine.queue().is_stopping:
            load.state, load.reason = "interrupted", "llmux is shutting down"
        elif ends:
            kind, load.reason = ends[-1]  # the earliest
            load.state = _ENDS[kind]
            if load.state == "failed":
                load.error = {"message": load.reason, "code": "load_failed"}
        else:
            load.state, load.reason = "cancelled", default_reason
        self._note_state(load)
        if not self._open and self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def _decisions(self, load: Load) -> Iterator[tuple[int, str, str]]:
        """Number, kind and reason of each decision since the load, or its worker, was started; the newest first."""
        for made in reversed(self._engine.decisions(load.worker)):
            if made.seq <= load.decided:
                return
            if made.model == load.worker:
                yield made.seq, made.kind, made.reason

    # --------------------------------------------------------------------------------------------------------- progress

    async def _watch(self) -> None:
        """Update the open loads periodically, until none is open."""
        while self._open:
            for load in tuple(self._open.values()):
                self._update(load.worker)
                if load.state == "running":
                    try:
                        await self._measure(load)
                    except Exception as error:
                        log.critical("load.unmeasured", load=load.id, exc_info=error)
            await asyncio.sleep(LOOK_S)

    async def _measure(self, load: Load) -> None:
        fleet, before = self._fleet, load.share
        status = self._engine.load_status(load.worker)
        if status is None or load.generation is None:
            return
        if load.bytes_total is None:
            try:
                model = fleet.effective(load.worker)
            except KeyError:
                return
            load.bytes_total = await asyncio.to_thread(_weights_bytes, model)
        shares = [load.share]
        if (progress := fleet.progress(load.worker, status.generation)) is not None:
            load.stage, load.bytes_read = progress.stage, progress.file_bytes
            shares += [progress.stage_share or 0.0]
            if load.bytes_total:
                shares += [progress.file_bytes / load.bytes_total]
        if status.measured_mib is not None:
            load.memory_mib = status.measured_mib
            shares += [status.measured_mib / max(1, load.lease_mib or 0)]
        if not load.is_over:
            load.share = min(MOST_SHARE, max(shares))
            if load.share != before:
                self._jobs.wake()
                self._publish(load)

    # ------------------------------------------------------------------------------------------------------------ views

    def views(self) -> schema.LoadList:
        """All loads, the newest first, and the errors of their estimates."""
        newest = sorted(self._jobs.of(Load), key=number_of, reverse=True)
        return schema.LoadList("list", [_view(load) for load in newest], _estimates(newest))

    def view(self, number: str) -> schema.Load:
        """The load with this number. Raises NotFoundError."""
        return _view(self._find(number))

    def current(self, model: ModelId) -> schema.Load | None:
        """The model's open load; of several replicas' loads the one with the most progress."""
        found = [load for load in self._open.values() if load.model == model]
        return _view(max(found, key=lambda load: load.share)) if found else None

    def last(self, model: ModelId) -> schema.Load | None:
        """The model's most recently ended load."""
        ended = (load for load in self._jobs.of(Load) if load.model == model and load.is_over)
        found = max(ended, key=lambda load: (load.ended_at or 0.0, number_of(load)), default=None)
        return None if found is None else _view(found)

    async def cancel(self, number: str) -> schema.Load:
        """Cancel a load in any state; its requests get an error. Raises NotFoundError, InvalidRequestError if it has ended."""
        load = self._find(number)
        if load.is_over:
            message = f"Load {number} of {load.worker} has ended: it is {load.api_state}."
            raise InvalidRequestError(message, code="load_ended")
        await self._jobs.cancel(load)
        return _view(load)

    async def _cancel(self, load: Load) -> None:
        self._engine.post(LoadCancelled(load.worker))
        if not load.is_over:
            self._update(load.worker)

    def _find(self, number: str) -> Load:
        load = self._jobs.get(f"load-{number}")
        if not isinstance(load, Load):
            message = f"There is no load {number[:50]!r}; GET /v1/admin/loads lists them."
            raise NotFoundError(message, code="load_not_found")
        return load

    # ---------------------------------------------------------------------------------------------------------- storing

    def _note_state(self, load: Load) -> None:
        """Save and publish a load after a change of its state."""
        self._save(load)
        self._publish(load)

    def _publish(self, load: Load) -> None:
        if self._hub.wants("load"):
            self._hub.publish("load", _view(load))

    def _save(self, load: Load) -> None:
        self._jobs.note(load, lambda reason: log.warning("load.not_saved", reason=reason))


def progress_of(load: Load) -> Progress:
    """The load's progress, with the remaining time."""
    message = load.reason if load.is_over else load.stage or load.reason
    return Progress(load.share, _eta_s(load, time.time()), message)


def _eta_s(load: Load, now: float) -> float | None:
    if load.state != "running" or load.started_at is None:
        return None
    so_far_s = now - load.started_at
    if load.expected_s is not None and so_far_s < load.expected_s:
        return load.expected_s - so_far_s
    return so_far_s * (1 / load.share - 1) if LEAST_SHARE <= load.share < MOST_SHARE else None


def _view(load: Load) -> schema.Load:
    now = time.time()
    eta_s = _eta_s(load, now)
    waits_s = max(0.0, (load.started_at or load.ended_at or now) - load.created_at)
    taken_s = load.took_s if load.started_at is None or load.is_over else now - load.started_at
    return schema.Load(
        id=load.id.removeprefix("load-"),
        model=base_of(load.worker),
        worker=load.worker,
        generation=load.generation,
        state=load.api_state,
        reason=load.reason,
        asked_at=load.created_at,
        started_at=load.started_at,
        ended_at=load.ended_at,
        waited_s=round(waits_s, 3),
        took_s=None if taken_s is None else round(taken_s, 3),
        expected_s=load.expected_s,
        eta_s=None if eta_s is None else round(eta_s, 1),
        progress=round(load.share, 3),
        stage=load.stage,
        bytes_read=load.bytes_read,
        bytes_total=load.bytes_total or None,
        memory_mib=load.memory_mib,
        lease_mib=load.lease_mib,
        devices=list(load.devices),
    )


def _estimates(loads: Sequence[Load]) -> schema.LoadEstimates:
    """The mean errors of the expected times."""
    errors_and_times = [
        (abs(load.took_s - load.expected_s), load.took_s)
        for load in loads
        if load.state == "completed" and load.expected_s is not None and load.took_s
    ]
    if not errors_and_times:
        return schema.LoadEstimates(0, None, None)
    return schema.LoadEstimates(
        loads=len(errors_and_times),
        mean_error_s=round(sum(error for error, _ in errors_and_times) / len(errors_and_times), 3),
        mean_error=round(sum(error / took for error, took in errors_and_times) / len(errors_and_times), 3),
    )


def _weights_bytes(model: CatalogModel) -> int:
    """The bytes of all files that a load reads; 0: unknown."""
    try:
        return sum(file.stat().st_size for file in model.adapter.weights(model.config))
    except (OSError, ModelUnusableError):
        return 0


def _has_ended(load: Load, status: LoadStatus | None) -> bool:
    """Whether the worker's present status ends the load."""
    if status is None:
        return True
    if load.state == "running":
        return status.state is not WorkerState.STARTING or status.generation != load.generation
    return status.state is not WorkerState.STARTING and not status.is_wanted
