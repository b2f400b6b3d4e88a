"""Jobs: inference requests whose clients don't wait. They are kept on disk, with their results, over restarts.

A job waits until one of `jobs_running` places is free; then its request goes the way of all others, with its client's priority
and limits. What was running when the daemon ended is run again. What is refused for now, by a full queue or a rate limit, is
tried again. An ended job goes after `jobs_keep_s`, or when the disk that jobs may take is full, the oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog
from pydantic import JsonValue

from supervisor.catalog.job_limits import JobsConfig
from supervisor.catalog.keys import Key, Scope
from supervisor.errors import NotFoundError, UnavailableError
from supervisor.io.files import replacing
from supervisor.io.store import Entry, NotSavedError, Store

State = Literal["queued", "running", "completed", "failed", "cancelled"]
Json = dict[str, JsonValue]

TRIES: Final = 20
"""So often a job is sent whose answer says `retry-after`."""
LONGEST_PAUSE_S: Final = 60.0
MESSAGE_LIMIT: Final = 1000
KEY: Final = "key"  # where the ASGI scope's state has the request's key
KEPT_HEADERS: Final = ("x-priority", "x-tenant-id", "x-allow-remote", "x-timeout", "anthropic-version")
"""Of the request that makes a job: they hold for its own."""
_COLLECTION: Final = "jobs"
_FOLDER: Final = "jobs"

log = structlog.get_logger("llmux.jobs")


class JobInterruptedError(Exception):
    """The daemon ends, or another one takes over: the job is to be run again."""


class JobFullError(UnavailableError):
    """No further job is taken now."""

    code = "queue_full"


@dataclass(slots=True)
class Job:
    """One job. Times are seconds since the epoch."""

    id: str
    endpoint: str  # path
    model: str | None
    headers: dict[str, str]  # of its request
    owner: str | None  # the key's name; None: no key was needed
    created_at: float
    state: State = "queued"
    started_at: float | None = None  # the last time
    ended_at: float | None = None
    tries: int = 0
    status: int | None = None  # of the answer
    content_type: str = ""
    result_bytes: int | None = None  # set iff there is a result
    request_bytes: int = 0
    error: dict[str, Any] | None = None  # as its endpoint's clients get it
    request_id: str = ""  # of its last try
    response: str | None = None  # the name of the kept response that it generates; then it goes when it is over

    @property
    def is_over(self) -> bool:
        """Has it ended, one way or the other?"""
        return self.state not in {"queued", "running"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of sending a job's request once."""

    status: int
    content_type: str
    body: bytes
    error: dict[str, Any] | None = None  # set iff it failed
    retry_after_s: float | None = None  # set iff it may be sent again


def owner_of(state: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Whose things a request may see, by its scope's state: the key's name, and whether all."""
    key: Key | None = state.get(KEY)
    return (None, True) if key is None else (key.name, Scope.ADMIN in key.scopes)


Send = Callable[[Job, bytes], Awaitable[Answer]]
"""Sends a job's request, with its body. Raises JobInterruptedError. Cancelled, it gives the worker up at once."""


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    is_cancelled: bool = False  # by its client, not by the daemon's end


@dataclass(slots=True)
class Jobs:
    """One for each daemon. Use from the event loop's thread."""

    folder: Path | None = None  # None until `open`
    config: JobsConfig = field(default_factory=JobsConfig)
    on_end: list[Callable[[Job], Awaitable[None]]] = field(default_factory=list)  # called for each that is over
    _store: Store | None = None
    _send: Send | None = None
    _all: dict[str, Job] = field(default_factory=dict)  # oldest first
    _running: dict[str, _Running] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_paused: bool = True
    """None begins, nor goes on: the daemon is about to end, or to hand over."""

    # -------------------------------------------------------------------------------------------------- begin and end

    def open(self, store: Store, folder: Path) -> None:
        """Go on with the jobs that are kept. Blocks on a folder."""
        self._store, self.folder = store, folder / _FOLDER
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for name, kept in store.items(_COLLECTION).items():
            try:
                found.append(msgspec.convert(kept, Job))
            except msgspec.ValidationError as error:
                log.warning("job.unreadable", job=name, reason=str(error))
        for job in sorted(found, key=lambda job: (job.created_at, job.id)):
            if job.state == "running":  # when the daemon ended
                job.state = "queued"
            self._all[job.id] = job
        for path in self.folder.iterdir():
            if path.stem not in self._all:
                path.unlink(missing_ok=True)

    def start(self, send: Send) -> None:
        """Send the requests of those that wait, now and later."""
        self._send = send
        self.go_on()

    def pause(self) -> None:
        """Begin no other job: the daemon is about to end, or to hand over."""
        self.is_paused = True

    def go_on(self) -> None:
        """Begin those for which there is a place, also after a pause."""
        self.is_paused = False
        self._fill()

    async def close(self) -> None:
        """Stop all that run: they are run again after the next `open` or `go_on`."""
        self.pause()
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def configure(self, config: JobsConfig) -> None:
        """New numbers."""
        self.config = config
        self._fill()

    # ------------------------------------------------------------------------------------------------------- for clients

    async def add(
        self,
        endpoint: str,
        model: str | None,
        headers: dict[str, str],
        body: bytes,
        owner: str | None,
        *,
        response: str | None = None,
    ) -> Job:
        """A new job. Raises JobFullError, and NotSavedError."""
        await self.expire()
        waiting = sum(not job.is_over for job in self._all.values())
        if waiting >= self.config.jobs_waiting + self.config.jobs_running or self.config.jobs_waiting == 0:
            raise JobFullError(f"{waiting} jobs wait already (limits.jobs_waiting).", retry_after_s=LONGEST_PAUSE_S)
        job = Job(
            f"job_{secrets.token_hex(12)}",
            endpoint,
            model,
            headers,
            owner,
            round(time.time(), 3),
            request_bytes=len(body),
            response=response,
        )
        self._make_room(len(body))
        await self._write(job, "request", body)
        await self._save(job)
        self._all[job.id] = job
        self._fill()
        self._tell()
        return job

    def find(self, job_id: str, owner: str | None, *, is_admin: bool) -> Job:
        """The job, for whom it is or for an admin. Raises NotFoundError."""
        job = self._all.get(job_id)
        if job is None or not (is_admin or job.owner == owner):
            raise NotFoundError(f"There is no job {job_id[:100]!r}, or no longer.", code="job_not_found")
        return job

    def generating(self, response: str) -> Job | None:
        """The job that generates this response; None: it is over."""
        return next((job for job in self._all.values() if job.response == response), None)

    def listing(self, owner: str | None, *, is_admin: bool) -> list[Job]:
        """The jobs of this owner, newest first; an admin sees all."""
        return [job for job in reversed(self._all.values()) if is_admin or job.owner == owner]

    def ahead(self, job: Job) -> int:
        """How many jobs wait before it."""
        ids = [other.id for other in self._all.values() if other.state == "queued"]
        return ids.index(job.id) if job.id in ids else 0

    async def result(self, job: Job) -> bytes:
        """The body of the answer. Raises NotFoundError if it is gone."""
        try:
            return await asyncio.to_thread(self._path(job, "result").read_bytes)
        except OSError as error:
            raise NotFoundError(f"The result of {job.id} is gone.", code="job_result_gone") from error

    async def cancel(self, job: Job) -> None:
        """End it, wherever it stands; one that is over stays as it is."""
        running = self._running.get(job.id)
        if running is not None:
            running.is_cancelled = True
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
        elif not job.is_over:
            await self._end(job, "cancelled")

    async def remove(self, job: Job) -> None:
        """End it, and forget it with its result."""
        await self.cancel(job)
        await self._forget([job])

    async def changed(self, timeout_s: float) -> None:
        """Wait until a job has changed, or so long."""
        event = self._changed
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), timeout_s)

    # --------------------------------------------------------------------------------------------------------- their way

    def _fill(self) -> None:
        """Use every free place."""
        if self._send is None or self.is_paused:
            return
        free = max(0, self.config.jobs_running - len(self._running))
        for job in [job for job in self._all.values() if job.state == "queued" and job.id not in self._running][:free]:
            self._running[job.id] = _Running(asyncio.create_task(self._run(job, self._send)))

    async def _run(self, job: Job, send: Send) -> None:
        job.state, job.started_at = "running", round(time.time(), 3)
        self._tell()
        try:
            answer = await self._sent(job, send)
            job.status, job.content_type, job.error = answer.status, answer.content_type, answer.error
            if answer.error is None:
                self._make_room(len(answer.body))
                await self._write(job, "result", answer.body)
                job.result_bytes = len(answer.body)
            await self._end(job, "completed" if answer.error is None else "failed")
        except (asyncio.CancelledError, JobInterruptedError):
            if self._running[job.id].is_cancelled:
                await self._end(job, "cancelled")
            else:
                job.state = "queued"
        except (OSError, NotSavedError, JobFullError) as error:
            job.error = {"message": f"Its result can't be kept: {error}"[:MESSAGE_LIMIT], "code": "job_not_kept"}
            await self._end(job, "failed")
        finally:
            del self._running[job.id]
            self._fill()

    async def _sent(self, job: Job, send: Send) -> Answer:
        """The answer, of several tries where the first ones are refused for now. Raises JobInterruptedError in a pause."""
        body = await asyncio.to_thread(self._path(job, "request").read_bytes)
        while True:
            job.tries += 1
            answer = await send(job, body)
            if self.is_paused and answer.error is not None:  # perhaps because the daemon ends
                raise JobInterruptedError
            if answer.retry_after_s is None or job.tries >= TRIES:
                return answer
            await asyncio.sleep(min(answer.retry_after_s, LONGEST_PAUSE_S))

    async def _end(self, job: Job, state: State) -> None:
        job.state, job.ended_at = state, round(time.time(), 3)
        self._path(job, "request").unlink(missing_ok=True)
        job.request_bytes = 0
        log.info("job.ended", job=job.id, state=state, endpoint=job.endpoint, model=job.model, tries=job.tries)
        for listener in self.on_end:
            await listener(job)
        if job.response is not None:
            await self._forget([job])
            return
        try:
            await self._save(job)
        except NotSavedError as error:
            log.warning("job.not_kept", job=job.id, reason=error.message)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -------------------------------------------------------------------------------------------------------------- disk

    async def expire(self) -> None:
        """Forget what has been kept long enough."""
        before = time.time() - self.config.jobs_keep_s
        await self._forget([job for job in self._all.values() if job.ended_at is not None and job.ended_at <= before])

    def _make_room(self, size: int) -> None:
        """Raises JobFullError where there is none: what waits and runs stays."""
        budget = self.config.jobs_mib << 20
        taken = sum(job.request_bytes + (job.result_bytes or 0) for job in self._all.values())
        for job in [job for job in self._all.values() if job.is_over and job.result_bytes]:
            if taken + size <= budget:
                return
            taken -= job.result_bytes or 0
            self._path(job, "result").unlink(missing_ok=True)
            job.result_bytes = None
        if taken + size > budget:
            raise JobFullError("Jobs take all the disk that they may (limits.jobs_mib).", retry_after_s=LONGEST_PAUSE_S)

    async def _write(self, job: Job, kind: str, data: bytes) -> None:
        def write() -> None:
            with replacing(path, 0o600) as new:
                new.write_bytes(data)

        path = self._path(job, kind)
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise NotSavedError(f"{path} can't be written: {error.strerror or error}") from error

    def _path(self, job: Job, kind: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{job.id}.{kind}"

    async def _save(self, *jobs: Job) -> None:
        if self._store is not None:
            async with self._store.transaction() as changes:
                changes.update({(_COLLECTION, job.id): msgspec.to_builtins(job) for job in jobs})

    async def _forget(self, jobs: Iterable[Job]) -> None:
        changed: dict[Entry, JsonValue] = {}
        for job in jobs:
            self._all.pop(job.id, None)
            self._path(job, "result").unlink(missing_ok=True)
            changed[_COLLECTION, job.id] = None
        if self._store is not None and changed:
            try:
                async with self._store.transaction() as changes:
                    changes.update(changed)
            except NotSavedError as error:
                log.warning("job.not_kept", reason=error.message)
        if changed:
            self._tell()
