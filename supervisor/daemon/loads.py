"""Loads as tasks: those that wait or run, with their progress, and the last that ended, kept over restarts.

A load begins when a model is wanted that isn't loaded, whoever asked, and ends when it is loaded, has failed, or nobody
wants it any more. Each try is a load of its own, and so is each replica. What was under way when the daemon ended was
interrupted. How one ended follows from the first decision about it that ends loads.

Progress is the greatest of three shares: bytes read of the weights' size, memory taken of what is leased, and what the last
line of the worker's log says. It never falls, and is below 1 until the model is loaded. The time left is the time that the
model's last load took; before the first, and when that is over, it follows from the progress until all is read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from pydantic import JsonValue

from runtimes.base import ModelUnusableError
from supervisor.catalog import CatalogModel
from supervisor.core.effects import Decided, Effect
from supervisor.core.events import Event, LoadAsked, LoadCancelled, RequestArrived, RequestFinished, UnloadAsked
from supervisor.core.types import SERVES, ModelId, WorkerState, base_of
from supervisor.engine.status import LoadStatus
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.io.store import Entry, NotSavedError, Store
from supervisor.schema import load as schema
from supervisor.schema.load import State

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

log = structlog.get_logger("llmux.loads")

KEPT: Final = 100
"""So many loads that ended are kept."""
LOOK_S: Final = 1.0
MOST_SHARE: Final = 0.99
"""Of a load that isn't over."""
LEAST_SHARE: Final = 0.05
"""From here on progress says how much time is left, until all is read: what a program does then, it does not show."""
_COLLECTION: Final = "loads"
_INTERRUPTED: Final = "llmux ended, or another daemon took over, before the model was loaded"
_UNWANTED: Final = "nobody waits for it any more"

Json = dict[str, JsonValue]
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
"""What decisions make of a load."""


@dataclass(slots=True)
class Load:
    """One load. Times are seconds since the epoch; None: not yet, or not known."""

    id: str
    worker: ModelId  # the model, or one of its replicas
    asked_at: float
    state: State = "waiting"
    reason: str = ""  # why it waits, was begun, or ended
    started_at: float | None = None
    ended_at: float | None = None
    generation: int | None = None
    devices: tuple[str, ...] = ()
    lease_mib: int | None = None
    expected_s: float | None = None  # how long its last load took
    took_s: float | None = None  # from the start of its worker to the end of the load
    share: float = 0.0  # of it that is done
    stage: str = ""  # the last line of its log
    bytes_read: int | None = None
    bytes_total: int | None = None
    memory_mib: int | None = None
    decided: int = 0  # number of the last decision when it began, or its worker was started

    @property
    def is_over(self) -> bool:
        """Has it ended, one way or the other?"""
        return self.state not in {"waiting", "loading"}

    def eta_s(self, now: float) -> float | None:
        """How much longer it takes; None: unknown."""
        if self.state != "loading" or self.started_at is None:
            return None
        so_far_s = now - self.started_at
        if self.expected_s is not None and so_far_s < self.expected_s:
            return self.expected_s - so_far_s
        return so_far_s * (1 / self.share - 1) if LEAST_SHARE <= self.share < MOST_SHARE else None


class Loads:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._store: Store | None = None
        self._open: dict[ModelId, Load] = {}  # by worker
        self._ended: deque[Load] = deque()  # oldest first
        self._last = 0  # number of the newest
        self._looking: asyncio.Task[None] | None = None  # set while any is open
        self._tasks: set[asyncio.Task[None]] = set()
        daemon.engine.observers.append(self.observe)

    def restore(self, store: Store) -> None:
        """Go on with the list that is kept there. Call it once, before the engine's first event."""
        self._store = store
        found: list[Load] = []
        changed: dict[Entry, JsonValue] = {}
        for name, kept in store.items(_COLLECTION).items():
            try:
                found.append(msgspec.convert({**kept, "id": str(int(name))}, Load))  # type: ignore[dict-item]
            except (msgspec.ValidationError, TypeError, ValueError) as error:
                log.warning("load.unreadable", load=name, reason=str(error))
                changed[_COLLECTION, name] = None
        for load in sorted(found, key=lambda load: int(load.id)):
            if not load.is_over:
                load.state, load.reason, load.ended_at = "interrupted", _INTERRUPTED, round(time.time(), 3)
                changed[_COLLECTION, load.id] = _kept(load)
            self._ended.append(load)
            self._last = max(self._last, int(load.id))
        self._save(changed)

    # ------------------------------------------------------------------------------------------------------ what happens

    def observe(self, event: Event, effects: Sequence[Effect]) -> None:
        """See `engine.Observer`."""
        kind = type(event)
        about = {effect.model for effect in effects if type(effect) is Decided and effect.model is not None}
        if isinstance(event, RequestArrived | LoadAsked):
            about.add(event.model)
        if kind is not RequestArrived and kind is not RequestFinished:
            about.update(self._open)
        unloaded = base_of(event.model) if type(event) is UnloadAsked else None
        for model in about:
            self._look_at(model, "unloaded by an operator" if base_of(model) == unloaded else _UNWANTED)

    def _look_at(self, model: ModelId, otherwise: str = _UNWANTED) -> None:
        """Take in what has become of its load; `otherwise`: why it ended where no decision says so."""
        status, load = self._daemon.engine.load_status(model), self._open.get(model)
        if status is not None and status.is_remote:
            status = None
        if load is not None and _is_over(load, status):
            self._end(load, status, otherwise)
            load = None
        if status is None or not (status.is_wanted or status.state is WorkerState.STARTING):
            return
        load = load or self._begin(model)
        if status.state is WorkerState.STARTING and load.state == "waiting":
            self._start(load, status)
        elif load.state == "waiting":
            load.reason = next(self._decisions(load), (0, "", load.reason))[2]

    def _begin(self, model: ModelId) -> Load:
        self._last += 1
        made = self._daemon.engine.decisions(model, limit=1)
        load = self._open[model] = Load(str(self._last), model, round(time.time(), 3))
        if made:
            load.decided, load.reason = made[-1].seq, made[-1].reason if made[-1].model == model else ""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="loads")
        self._tell(load)
        return load

    def _start(self, load: Load, status: LoadStatus) -> None:
        load.state = "loading"
        load.decided, _, load.reason = next(self._decisions(load), (load.decided, "", load.reason))
        load.started_at = max(load.asked_at, round(time.time() - status.since_s, 3))
        load.generation, load.devices = status.generation, status.devices
        load.lease_mib, load.expected_s = status.lease_mib, status.load_s
        self._tell(load)

    def _end(self, load: Load, status: LoadStatus | None, otherwise: str) -> None:
        del self._open[load.worker]
        load.ended_at = round(time.time(), 3)
        ends = [(kind, reason) for _, kind, reason in self._decisions(load) if kind in _ENDS]
        if load.started_at is not None:
            load.took_s = round(load.ended_at - load.started_at, 3)
        if status is not None and status.state in SERVES and load.generation in {None, status.generation}:
            load.state, load.reason, load.share = "ready", status.reason, 1.0
            load.took_s = status.load_s
        elif self._daemon.engine.queue().is_stopping:
            load.state, load.reason = "interrupted", "llmux is shutting down"
        elif ends:
            kind, load.reason = ends[-1]  # the first of them
            load.state = _ENDS[kind]
        else:
            load.state, load.reason = "cancelled", otherwise
        self._ended.append(load)
        self._tell(load)
        if not self._open and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _decisions(self, load: Load) -> Iterator[tuple[int, str, str]]:
        """Number, kind and reason of those about it since it began, or its worker was started; the newest first."""
        for made in reversed(self._daemon.engine.decisions(load.worker)):
            if made.seq <= load.decided:
                return
            if made.model == load.worker:
                yield made.seq, made.kind, made.reason

    # --------------------------------------------------------------------------------------------------------- progress

    async def _look(self) -> None:
        """Look at those that are under way, as long as there are some."""
        while self._open:
            for load in tuple(self._open.values()):
                self._look_at(load.worker)
                if load.state == "loading":
                    try:
                        await self._measure(load)
                    except Exception as error:
                        log.critical("load.unmeasured", load=load.id, exc_info=error)
            await asyncio.sleep(LOOK_S)

    async def _measure(self, load: Load) -> None:
        fleet, before = self._daemon.fleet, load.share
        status = self._daemon.engine.load_status(load.worker)
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
                self._publish(load)

    # ------------------------------------------------------------------------------------------------------------- views

    def views(self) -> schema.LoadList:
        """All of them, the newest first, and how good the estimates were."""
        found = [*self._open.values(), *self._ended]
        newest = sorted(found, key=lambda load: int(load.id), reverse=True)
        return schema.LoadList("list", [self._view(load) for load in newest], self._estimates())

    def view(self, number: str) -> schema.Load:
        """One of them. Raises NotFoundError."""
        return self._view(self._found(number))

    def current(self, model: ModelId) -> schema.Load | None:
        """The one of this model that waits or runs; of its replicas', the furthest."""
        found = [load for worker, load in self._open.items() if base_of(worker) == model]
        return self._view(max(found, key=lambda load: load.share)) if found else None

    def last(self, model: ModelId) -> schema.Load | None:
        """The model's last one that ended."""
        return next((self._view(load) for load in reversed(self._ended) if base_of(load.worker) == model), None)

    def cancel(self, number: str) -> schema.Load:
        """End it, wherever it stands; who waits for it is told. Raises NotFoundError, InvalidRequestError for one that has ended."""
        load = self._found(number)
        if load.is_over:
            message = f"Load {load.id} of {load.worker} has ended: it is {load.state}."
            raise InvalidRequestError(message, code="load_ended")
        self._daemon.engine.post(LoadCancelled(load.worker))
        if not load.is_over:
            self._look_at(load.worker)
        return self._view(load)

    def _found(self, number: str) -> Load:
        for load in (*self._open.values(), *self._ended):
            if load.id == number:
                return load
        raise NotFoundError(f"There is no load {number[:50]!r}; GET /v1/admin/loads lists them.", code="load_not_found")

    def _view(self, load: Load) -> schema.Load:
        now = time.time()
        eta_s = load.eta_s(now)
        waits_s = max(0.0, (load.started_at or load.ended_at or now) - load.asked_at)
        taken_s = load.took_s if load.started_at is None or load.is_over else now - load.started_at
        return schema.Load(
            id=load.id,
            model=base_of(load.worker),
            worker=load.worker,
            generation=load.generation,
            state=load.state,
            reason=load.reason,
            asked_at=load.asked_at,
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

    def _estimates(self) -> schema.LoadEstimates:
        """How far the expected times were from those that came."""
        came = [
            (abs(load.took_s - load.expected_s), load.took_s)
            for load in self._ended
            if load.state == "ready" and load.expected_s is not None and load.took_s
        ]
        if not came:
            return schema.LoadEstimates(0, None, None)
        return schema.LoadEstimates(
            loads=len(came),
            mean_error_s=round(sum(error for error, _ in came) / len(came), 3),
            mean_error=round(sum(error / took for error, took in came) / len(came), 3),
        )

    # -------------------------------------------------------------------------------------------------------------- kept

    def _tell(self, load: Load) -> None:
        """It has entered another state."""
        changed: dict[Entry, JsonValue] = {(_COLLECTION, load.id): _kept(load)}
        while len(self._ended) > KEPT:
            changed[_COLLECTION, self._ended.popleft().id] = None
        self._save(changed)
        self._publish(load)

    def _publish(self, load: Load) -> None:
        if self._daemon.hub.wants("load"):
            self._daemon.hub.publish("load", self._view(load))

    def _save(self, changed: dict[Entry, JsonValue]) -> None:
        if self._store is not None and changed:
            self._tasks.add(task := asyncio.create_task(self._put(self._store, changed)))
            task.add_done_callback(self._tasks.discard)

    async def _put(self, store: Store, changed: dict[Entry, JsonValue]) -> None:
        try:
            async with store.transaction() as changes:
                changes.update(changed)
        except NotSavedError as error:
            log.warning("load.not_saved", reason=error.message)


def _weights_bytes(model: CatalogModel) -> int:
    """Of all that a load reads; 0: unknown."""
    try:
        return sum(file.stat().st_size for file in model.adapter.weights(model.config))
    except (OSError, ModelUnusableError):
        return 0


def _is_over(load: Load, status: LoadStatus | None) -> bool:
    """Does what is known now end it?"""
    if status is None:
        return True
    if load.state == "loading":
        return status.state is not WorkerState.STARTING or status.generation != load.generation
    return status.state is not WorkerState.STARTING and not status.is_wanted


def _kept(load: Load) -> Json:
    return {**asdict(load), "devices": list(load.devices)}
