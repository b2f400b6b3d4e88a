"""All jobs, of every kind: their records on disk and in memory, access to them, their expiry, and waiting for changes.

Each kind has a module: `inference` sends requests, `batches` sends the lines of files, `loads` watches models load, `pulls`
fetches files. Each module registers a `Kind`: how its jobs are cancelled, and how long they are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
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
    """The progress of a job, up to its end."""

    share: float | None = None  # of the work that is done, from 0 to 1; None: unknown
    eta_s: float | None = None  # seconds until the end; None: unknown
    message: str = ""  # the reason for waiting, the present step, or the reason for the end


@dataclass(frozen=True, slots=True)
class Kind:
    """Operations and limits that a kind's module registers for its jobs."""

    cancel: Callable[[Any], Awaitable[None]]
    """Cancels a job in any state. A job that is over stays as it is. Raises LlmuxError."""
    progress: Callable[[Any], Progress] = lambda _: Progress()
    most: int = 10_000
    """The most ended jobs that are kept."""
    keep_s: Callable[[], float] = lambda: float("inf")
    """Seconds that an ended job is kept."""
    forget: Callable[[Sequence[Any]], None] = lambda _: None
    """Removes the files of these jobs: after their records, or before, to free space if the records can't be deleted."""


@dataclass(slots=True)
class Jobs:
    """One for each daemon. Use from the event loop's thread."""

    kinds: dict[type[Job], Kind] = field(default_factory=dict)
    on_sweep: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called periodically, after `expire`."""
    version: int = 0  # incremented by each change
    _store: Store | None = None
    _all: dict[type[Job], dict[str, Job]] = field(default_factory=lambda: defaultdict(dict))
    """By kind and by each of its base kinds; the oldest first. So a lookup of one kind never scans all jobs."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _change_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sweeping: asyncio.Task[None] | None = None
    _noting: set[asyncio.Task[None]] = field(default_factory=set)

    def open(self, store: Store, owners: Mapping[str, str] | None = None) -> None:
        """Read the stored jobs. An unreadable row is logged and stays in the store. `owners`: see `job.former_owners`."""
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
        """Begin to sweep expired jobs periodically."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="jobs")

    def stop(self) -> None:
        """Stop the periodic sweep."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    # ---------------------------------------------------------------------------------------------------------- reading

    @property
    def are_known(self) -> bool:
        """Whether the store could be read. If not, it may hold more jobs, whose files must stay for a later start."""
        return self._store is not None and self._store.trouble is None

    def of(self, kind: type[JobT]) -> list[JobT]:
        """The jobs of a kind and of its subclasses, the oldest first."""
        return cast("list[JobT]", [*self._all[kind].values()])

    def get(self, job_id: str) -> Job | None:
        """The job with this id."""
        return self._all[Job].get(job_id)

    def find(
        self, kind: type[JobT], job_id: str, owner: str | None, *, is_admin: bool, code: str = "job_not_found"
    ) -> JobT:
        """The job, for its owner or an admin. Raises NotFoundError with this `code`, whose first word names the kind."""
        job = self._all[kind].get(job_id)
        if job is None or not (is_admin or job.owner == owner):
            raise NotFoundError(f"There is no {code.partition('_')[0]} {job_id[:100]!r}, or no longer.", code=code)
        return cast("JobT", job)

    def listing(self, kind: type[JobT], owner: str | None, *, is_admin: bool) -> list[JobT]:
        """The owner's jobs of a kind, the newest first; an admin sees all."""
        return [job for job in reversed(self.of(kind)) if is_admin or job.owner == owner]

    async def changed(self, timeout_s: float) -> None:
        """Wait until any job has changed, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    # ---------------------------------------------------------------------------------------------------------- writing

    def add(self, job: Job) -> None:
        """Add a job in memory, so that lookups find it."""
        self._put(job)
        self.wake()

    async def save(self, job: Job) -> None:
        """Write the job's record to disk. Raises NotSavedError."""
        await self._change({(_COLLECTION, job.id): msgspec.to_builtins(job)})

    async def change(self, job: Job, also: Mapping[Entry, JsonValue] | None = None, **changes: object) -> None:
        """Write changed fields to disk, in one transaction with the entries of `also`, and only then set them in memory.

        Raises NotSavedError: then nothing has changed. Changes run one after the other.
        """
        async with self._change_lock:
            row = msgspec.to_builtins(replace(job, **changes))
            await self._change({(_COLLECTION, job.id): row, **(also or {})})
            for name, value in changes.items():
                setattr(job, name, value)
        self.wake()

    def drop(self, job: Job) -> None:
        """Remove a job from memory, so that lookups don't find it. Its record stays until `forget`."""
        self._pop(job)
        self.wake()

    def note(self, job: Job, failed: Callable[[str], object]) -> None:
        """Write a job's record in the background, and remove the oldest ended jobs of its kind beyond `most`.

        `failed` is called with the reason if that fails on disk.
        """
        removed = self._surplus(type(job))
        changes: dict[Entry, JsonValue] = {(_COLLECTION, job.id): msgspec.to_builtins(job)}
        changes.update({(_COLLECTION, old.id): None for old in removed})
        self._remove(removed)
        if self._store is not None:
            self._noting.add(task := asyncio.create_task(self._write_note(changes, failed)))
            task.add_done_callback(self._noting.discard)

    async def _write_note(self, changes: Mapping[Entry, JsonValue], failed: Callable[[str], object]) -> None:
        try:
            await self._change(changes)
        except NotSavedError as error:
            failed(error.message)

    async def forget(self, jobs: Iterable[Job]) -> None:
        """Delete these jobs with their records and files. Raises NotSavedError: then the records stay."""
        removed = [*jobs]
        if not removed:
            return
        records: dict[Entry, JsonValue] = {(_COLLECTION, job.id): None for job in removed}
        try:
            await self._change(records)
        except NotSavedError:
            for job in removed:  # their files may have filled the disk
                self.kinds[type(job)].forget([job])
            await self._change(records)
        self._remove(removed)

    def _remove(self, removed: Sequence[Job]) -> None:
        for job in removed:
            self._pop(job)
            self.kinds[type(job)].forget([job])
        self.wake()

    def _put(self, job: Job) -> None:
        for kind in _kinds_of(type(job)):
            self._all[kind][job.id] = job

    def _pop(self, job: Job) -> None:
        for kind in _kinds_of(type(job)):
            self._all[kind].pop(job.id, None)

    def wake(self) -> None:
        """Wake all callers that wait in `changed`."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def cancel(self, job: Job) -> None:
        """Cancel a job in any state. A job that is over stays as it is. Raises LlmuxError if it can't be cancelled."""
        if not job.is_over:
            await self.kinds[type(job)].cancel(job)

    async def expire(self, base: type[Job] = Job) -> None:
        """Forget ended jobs of this kind and its subclasses: those older than `keep_s`, and the oldest beyond `most`."""
        expired: dict[str, Job] = {}
        for kind in self.kinds:
            if issubclass(kind, base):
                expired.update((job.id, job) for job in (*self._outdated(kind), *self._surplus(kind)))
        try:
            await self.forget(expired.values())
        except NotSavedError as error:
            log.warning("job.not_kept", reason=error.message)

    def _outdated(self, kind: type[Job]) -> list[Job]:
        """The ended jobs of exactly this kind that were kept for `keep_s`."""
        if (before := time.time() - self.kinds[kind].keep_s()) <= 0:  # as with an infinite time
            return []
        return [job for job in self._exactly(kind) if job.ended_at is not None and job.ended_at <= before]

    def _surplus(self, kind: type[Job]) -> list[Job]:
        """The oldest ended jobs of exactly this kind that are beyond its `most`. Counts only if there may be any."""
        most = self.kinds[kind].most
        if len(self._all[kind]) <= most:
            return []
        ended = [job for job in self._exactly(kind) if job.is_over]
        return ended[: max(0, len(ended) - most)]

    def _exactly(self, kind: type[Job]) -> Iterator[Job]:
        return (job for job in self._all[kind].values() if type(job) is kind)

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
def _kinds_of(kind: type[Job]) -> tuple[type[Job], ...]:
    """The kind and its base classes, up to `Job`."""
    return tuple(each for each in kind.__mro__ if issubclass(each, Job))
