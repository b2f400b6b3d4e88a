"""All jobs, of every kind: their records on disk and in memory, who may see them, how long they stay, and who waits for a change.

What a kind does is its own module's: `inference` sends requests, `batches` sends the lines of files, `loads` watches models come,
`pulls` fetches files. Each registers how its jobs are cancelled and how long they stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog
from msgspec.structs import replace
from pydantic import JsonValue

from supervisor.errors import NotFoundError
from supervisor.host.store.store import Entry, NotSavedError, Store
from supervisor.jobs.job import AnyJob, Job

SWEEP_S: Final = 60.0
_COLLECTION: Final = "jobs"

JobT = TypeVar("JobT", bound=Job)

log = structlog.get_logger("llmux.jobs")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, or was when it ended."""

    share: float | None = None  # of it that is done, from 0 to 1; None: unknown
    eta_s: float | None = None  # how much longer it takes; None: unknown
    message: str = ""  # why it waits, what it does, or why it ended


@dataclass(frozen=True, slots=True)
class Kind:
    """What the module of a kind does for its jobs."""

    cancel: Callable[[Any], Awaitable[None]]
    """Ends a job, wherever it stands. One that is over stays as it is. Raises LlmuxError."""
    progress: Callable[[Any], Progress] = lambda _: Progress()
    most: int = 10_000
    """So many jobs that have ended are kept."""
    keep_s: Callable[[], float] = lambda: float("inf")
    """How long a job that has ended is kept."""
    forget: Callable[[Sequence[Any]], None] = lambda _: None
    """Removes what these jobs have besides their records, once those are gone, or to make room where they can't go."""


@dataclass(slots=True)
class Jobs:
    """One for each daemon. Use from the event loop's thread."""

    kinds: dict[type[Job], Kind] = field(default_factory=dict)
    on_sweep: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called from time to time, after `expire`."""
    version: int = 0  # another one after each change
    _store: Store | None = None
    _all: dict[type[Job], dict[str, Job]] = field(default_factory=lambda: defaultdict(dict))
    """By kind, also those that a kind is made from; the oldest first. There may be ten thousand: none is looked at in vain."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sweeping: asyncio.Task[None] | None = None
    _noting: set[asyncio.Task[None]] = field(default_factory=set)

    def open(self, store: Store, owners: Mapping[str, str] | None = None) -> None:
        """Read the jobs that are kept. A row that can't be read is logged, and stays. `owners`: see `job.former_owners`."""
        self._store = store
        found: list[Job] = []
        for name, row in store.items(_COLLECTION).items():
            try:
                found.append(msgspec.convert(row, AnyJob))
            except msgspec.ValidationError as error:
                log.warning("job.unreadable", job=name, reason=str(error))
        for job in sorted(found, key=lambda job: (job.created_at, job.id)):
            job.owner = (owners or {}).get(job.owner or "", job.owner)
            self._put(job)

    def start(self) -> None:
        """Forget jobs whose time is over, from now on."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="jobs")

    def stop(self) -> None:
        """Undo `start`."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    # ------------------------------------------------------------------------------------------------------------ reading

    @property
    def are_known(self) -> bool:
        """Could the store be read? Else there may be others, whose requests and results must stay for a later start."""
        return self._store is not None and self._store.trouble is None

    def of(self, kind: type[JobT]) -> list[JobT]:
        """The jobs of a kind, and of kinds made from it, the oldest first."""
        return cast("list[JobT]", [*self._all[kind].values()])

    def get(self, job_id: str) -> Job | None:
        """The job of this id."""
        return self._all[Job].get(job_id)

    def find(
        self, kind: type[JobT], job_id: str, owner: str | None, *, is_admin: bool, code: str = "job_not_found"
    ) -> JobT:
        """The job, for its owner or for an admin. Raises NotFoundError with this `code`, whose first word names the kind."""
        job = self._all[kind].get(job_id)
        if job is None or not (is_admin or job.owner == owner):
            raise NotFoundError(f"There is no {code.partition('_')[0]} {job_id[:100]!r}, or no longer.", code=code)
        return cast("JobT", job)

    def listing(self, kind: type[JobT], owner: str | None, *, is_admin: bool) -> list[JobT]:
        """The owner's jobs of a kind, the newest first; an admin sees all."""
        return [job for job in reversed(self.of(kind)) if is_admin or job.owner == owner]

    async def changed(self, timeout_s: float) -> None:
        """Wait until any job has changed, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    # ------------------------------------------------------------------------------------------------------------ writing

    def add(self, job: Job) -> None:
        """From now on it is found."""
        self._put(job)
        self.wake()

    async def save(self, job: Job) -> None:
        """Write it down. Raises NotSavedError."""
        await self._change({(_COLLECTION, job.id): msgspec.to_builtins(job)})

    async def change(self, job: Job, also: Mapping[Entry, JsonValue] | None = None, **changes: object) -> None:
        """Write down its changed fields, in one step with what `also` has, and only then change them.

        Raises NotSavedError: then nothing has changed. One change comes after the other.
        """
        async with self._turn:
            row = msgspec.to_builtins(replace(job, **changes))
            await self._change({(_COLLECTION, job.id): row, **(also or {})})
            for name, value in changes.items():
                setattr(job, name, value)
        self.wake()

    def drop(self, job: Job) -> None:
        """From now on it isn't found. Its record stays until `forget`."""
        self._pop(job)
        self.wake()

    def note(self, job: Job, failed: Callable[[str], object]) -> None:
        """Write it down in the background, and remove the oldest of its kind that have ended and are too many.

        `failed` is called with the reason if they can't be written or removed on disk.
        """
        over = [other for other in self.of(type(job)) if other.is_over]
        removed = over[: max(0, len(over) - self.kinds[type(job)].most)]
        changes: dict[Entry, JsonValue] = {(_COLLECTION, job.id): msgspec.to_builtins(job)}
        changes.update({(_COLLECTION, old.id): None for old in removed})
        self._remove(removed)
        if self._store is not None:
            self._noting.add(task := asyncio.create_task(self._note(changes, failed)))
            task.add_done_callback(self._noting.discard)

    async def _note(self, changes: Mapping[Entry, JsonValue], failed: Callable[[str], object]) -> None:
        try:
            await self._change(changes)
        except NotSavedError as error:
            failed(error.message)

    async def forget(self, jobs: Iterable[Job]) -> None:
        """Remove these with all that they have. Raises NotSavedError: then their records stay."""
        removed = [*jobs]
        if not removed:
            return
        records: dict[Entry, JsonValue] = {(_COLLECTION, job.id): None for job in removed}
        try:
            await self._change(records)
        except NotSavedError:
            for job in removed:  # perhaps the disk is full of them
                self.kinds[type(job)].forget([job])
            await self._change(records)
        self._remove(removed)

    def _remove(self, removed: Sequence[Job]) -> None:
        for job in removed:
            self._pop(job)
            self.kinds[type(job)].forget([job])
        self.wake()

    def _put(self, job: Job) -> None:
        for kind in _made_from(type(job)):
            self._all[kind][job.id] = job

    def _pop(self, job: Job) -> None:
        for kind in _made_from(type(job)):
            self._all[kind].pop(job.id, None)

    def wake(self) -> None:
        """Wake whoever waits in `changed`."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def cancel(self, job: Job) -> None:
        """End it, wherever it stands; one that is over stays as it is. Raises LlmuxError where it can't be ended."""
        if not job.is_over:
            await self.kinds[type(job)].cancel(job)

    async def remove(self, job: Job) -> None:
        """End it, and forget it. Raises LlmuxError where it can't be ended, or can't be forgotten."""
        await self.cancel(job)
        await self.forget([job])

    async def expire(self, made_from: type[Job] = Job) -> None:
        """Forget jobs of these kinds that have been kept long enough, and of too many the oldest."""
        now, old = time.time(), list[Job]()
        for of_type, kind in self.kinds.items():
            if not issubclass(of_type, made_from):
                continue
            over = [job for job in self._all[of_type].values() if job.ended_at is not None and type(job) is of_type]
            before, surplus = now - kind.keep_s(), len(over) - kind.most
            old += [job for place, job in enumerate(over) if place < surplus or (job.ended_at or 0) <= before]
        try:
            await self.forget(old)
        except NotSavedError as error:
            log.warning("job.not_kept", reason=error.message)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.expire()
            for sweep in self.on_sweep:
                await sweep()

    async def _change(self, entries: Mapping[Entry, JsonValue]) -> None:
        assert self._store is not None
        async with self._store.transaction() as changes:
            changes.update(entries)


@cache
def _made_from(kind: type[Job]) -> tuple[type[Job], ...]:
    """It, and the kinds that it is made from, up to `Job`."""
    return tuple(each for each in kind.__mro__ if issubclass(each, Job))
