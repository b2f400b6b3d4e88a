"""Jobs: inference requests whose clients don't wait. They are kept on disk, with their results, over restarts.

A job waits until one of `jobs_running` places is free; then its request goes the way of all others, with its client's priority
and limits. The next place is for the key that has the fewest. What was running when the daemon ended is run again, unless the
daemon died of it, or with it, `DEATHS` times. What is refused for now, by a full queue or a rate limit, gives its place back and
is tried again. An ended job goes after `jobs_keep_s`, or when the disk that jobs may take is full, the oldest first.

A job is over when that is on disk, and not before: clients never see an end that a restart takes back. One whose end can't be
written down waits, and is sent again.

The lines of batches (`daemon.batches`) are jobs, too. They get a place only when no other job wants it, and leave one free, if
there are several.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import structlog
from pydantic import JsonValue

from supervisor.catalog.job_limits import JobsConfig
from supervisor.daemon.files import Files
from supervisor.daemon.job import (
    Answer,
    Job,
    JobFullError,
    JobInterruptedError,
    Line,
    Running,
    Send,
    failed,
)
from supervisor.errors import NotFoundError, TooLargeError, UnavailableError
from supervisor.io.files import replacing
from supervisor.io.request_buffer import Bytes
from supervisor.io.store import Entry, NotSavedError, Store
from supervisor.schema.job import JobState

TRIES: Final = 20
"""So often a job is sent whose answer says `retry-after`."""
DEATHS: Final = 3
"""So often the daemon may die while a job is sent: perhaps it is the job that kills it."""
LONGEST_PAUSE_S: Final = 60.0
MESSAGE_LIMIT: Final = 1000
MOST_ENDED: Final = 10_000
"""So many jobs that have ended are remembered, with or without a result."""
SWEEP_S: Final = 60.0
_COLLECTION: Final = "jobs"  # and the folder

log = structlog.get_logger("llmux.jobs")


@dataclass(slots=True)
class Jobs:
    """One for each daemon. Use from the event loop's thread."""

    folder: Path | None = None  # None until `open`
    config: JobsConfig = field(default_factory=JobsConfig)
    files: Files = field(default_factory=Files)  # which share the disk that jobs may take
    on_end: list[Callable[[Job, Answer | None], Awaitable[None]]] = field(default_factory=list)
    """Called for each that is over, with its answer; None: it was cancelled."""
    _store: Store | None = None
    _send: Send | None = None
    _all: dict[str, Job] = field(default_factory=dict)  # oldest first
    _coming: dict[str, int] = field(default_factory=dict)  # bytes of those that are being written
    _running: dict[str, Running] = field(default_factory=dict)
    _resting: set[str] = field(default_factory=set)  # that were refused for now
    _places: dict[str, int] | None = None  # of those that wait, in their line; None: not counted yet
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _sweeping: asyncio.Task[None] | None = None
    is_paused: bool = True
    """None begins, nor goes on: the daemon is about to end, or to hand over."""

    # -------------------------------------------------------------------------------------------------- begin and end

    def open(self, store: Store, folder: Path, owners: Mapping[str, str] | None = None) -> None:
        """Go on with the jobs that are kept. Blocks on a folder. One that can't be used is logged, and no jobs are taken.

        `owners`: see `former_owners`.
        """
        folder /= _COLLECTION
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = {path.name: path for path in folder.iterdir()}
        except OSError as error:
            log.warning("jobs.unusable", folder=str(folder), reason=str(error), consequence="no jobs are taken")
            return
        self._store, self.folder = store, folder
        found = []
        for name, kept in store.items(_COLLECTION).items():
            try:
                found.append(msgspec.convert(kept, Job))
            except msgspec.ValidationError as error:
                log.warning("job.unreadable", job=name, reason=str(error))
        for job in sorted(found, key=lambda job: (job.created_at, job.id)):
            if not job.is_over:
                job.state = "queued"  # if it was running when the daemon ended
            elif job.result_bytes is not None and self._path(job, "result").name not in files:
                job.result_bytes = None
            files.pop(self._path(job, "result" if job.is_over else "request").name, None)
            job.owner = (owners or {}).get(job.owner or "", job.owner)
            self._all[job.id] = job
        for path in files.values():
            with contextlib.suppress(OSError):
                path.unlink()

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
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="jobs")
        self._fill()

    async def close(self) -> None:
        """Stop all that run: they are run again after the next `open` or `go_on`."""
        self.pause()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for running in self._running.values():
            running.stop()
        if tasks := [running.task for running in self._running.values() if running.task is not None]:
            await asyncio.wait(tasks)

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
        body: Bytes,
        owner: str | None,
        *,
        response: str | None = None,
        line: Line | None = None,
    ) -> Job:
        """A new job. Raises JobFullError, TooLargeError, and NotSavedError."""
        if self.folder is None:
            raise UnavailableError("Jobs can't be kept; the log says why.")
        await self.expire()
        waiting = sum(not job.is_over and job.line is None for job in self._all.values()) + len(self._coming)
        is_full = line is None and waiting >= self.config.jobs_waiting + self.config.jobs_running
        if is_full or self.config.jobs_waiting == 0:
            raise JobFullError(f"{waiting} jobs wait already (limits.jobs_waiting).", retry_after_s=LONGEST_PAUSE_S)
        self.make_room(len(body))
        job = Job(f"job_{secrets.token_hex(12)}", endpoint, model, headers, owner, round(time.time(), 3))
        job.request_bytes, job.response, job.line = len(body), response, line
        self._coming[job.id] = len(body)
        try:
            await self._write(job, "request", body)
            await self._save(job)
        except BaseException:
            self._unlink(job, "request")
            raise
        finally:
            del self._coming[job.id]
        self._all[job.id] = job
        self.tell()
        self._fill()
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

    def lines(self) -> list[Job]:
        """Those that answer a line of a batch."""
        return [job for job in self._all.values() if job.line is not None]

    def listing(self, owner: str | None, *, is_admin: bool) -> list[Job]:
        """The jobs of this owner, newest first; an admin sees all."""
        return [job for job in reversed(self._all.values()) if is_admin or job.owner == owner]

    def ahead(self, job: Job) -> int:
        """How many of those that wait come before it."""
        if self._places is None:
            waiting = [other for other in self._all.values() if other.state == "queued"]
            waiting.sort(key=lambda other: other.line is not None)
            self._places = {other.id: place for place, other in enumerate(waiting)}
        return self._places.get(job.id, 0)

    async def result(self, job: Job) -> BinaryIO:
        """The file with the body of the answer; close it. Raises NotFoundError if it is gone."""
        try:
            return await asyncio.to_thread(self._path(job, "result").open, "rb")
        except OSError as error:
            raise NotFoundError(f"The result of {job.id} is gone.", code="job_result_gone") from error

    async def cancel(self, job: Job) -> None:
        """End it, wherever it stands; one that is over, or has its answer already, stays as it is.

        Raises NotSavedError where that can't be written down: then it waits, and is sent again.
        """
        if job.is_over:
            return
        running = self._running.get(job.id) or self._begin(job)  # one that waits must not begin meanwhile
        running.is_cancelled = True
        running.stop()
        assert running.task is not None
        await asyncio.wait([running.task])  # which leaves it alone if this one is cancelled
        if not job.is_over:
            raise NotSavedError(f"{job.id} can't be cancelled: that can't be written down now, so it is sent again.")

    async def remove(self, job: Job) -> None:
        """End it, and forget it with its result. Raises NotSavedError."""
        await self.cancel(job)
        await self._forget([job])

    async def changed(self, timeout_s: float) -> None:
        """Wait until a job has changed, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    # --------------------------------------------------------------------------------------------------------- their way

    def _fill(self) -> None:
        """Use every free place."""
        if self._send is None or self.is_paused:
            return
        free = max(0, self.config.jobs_running - len(self._running))
        running = [self._all[job] for job in self._running if job in self._all]
        busy = Counter(job.owner for job in running)
        for_lines = max(1, self.config.jobs_running - 1) - sum(job.line is not None for job in running)
        waiting: dict[bool, dict[str | None, deque[Job]]] = {False: {}, True: {}}  # is it a line, by key
        for job in self._all.values():
            if job.state == "queued" and job.id not in self._running and job.id not in self._resting:
                waiting[job.line is not None].setdefault(job.owner, deque()).append(job)
        for is_line, places in ((False, free), (True, for_lines)):
            queues = waiting[is_line]
            for _ in range(min(free, places, sum(map(len, queues.values())))):
                oldest = (queue[0] for queue in queues.values() if queue)
                job = queues[min(oldest, key=lambda one: (busy[one.owner], one.created_at)).owner].popleft()
                busy[job.owner] += 1
                free -= 1
                self._begin(job)

    def _begin(self, job: Job) -> Running:
        running = self._running[job.id] = Running()
        running.task = asyncio.create_task(self._run(job, running))
        return running

    async def _run(self, job: Job, running: Running) -> None:
        answer = None
        try:
            answer = None if running.is_stopped else await self._answer(job, running)
            pause_s = 0.0 if answer is None else answer.retry_after_s if job.tries < TRIES else None
            if pause_s is not None:
                await self._saved(job)
            if running.is_cancelled:
                await self._end(job, "cancelled")
            elif answer is None or pause_s is not None:
                self._rest(job, min(pause_s or 0.0, LONGEST_PAUSE_S))
            else:
                await self._keep(job, answer)
        except NotSavedError as error:
            log.warning("job.not_kept", job=job.id, reason=error.message, consequence="it is sent again")
            self._rest(job, LONGEST_PAUSE_S)
        finally:
            if answer is not None and answer.held is not None:
                answer.held.release()
            del self._running[job.id]
            self.tell()
            self._fill()

    async def _answer(self, job: Job, running: Running) -> Answer | None:
        """None: it was stopped."""
        if job.deaths >= DEATHS:
            return failed("job_given_up", f"llmux died {DEATHS} times while it sent this job; the log may say why.")
        job.tries += 1
        job.deaths += 1  # until it is known to have outlived this
        try:
            if not await self._saved(job):
                return failed("job_not_kept", "Its start can't be written down; the log says why.", LONGEST_PAUSE_S)
            if running.is_stopped:
                return None
            job.state, job.started_at = "running", round(time.time(), 3)
            self.tell()
            running.is_sending = True
            assert self._send is not None
            answer = await self._send(job, await asyncio.to_thread(self._path(job, "request").read_bytes))
        except JobInterruptedError:
            return None
        except asyncio.CancelledError:
            if not running.is_stopped:
                raise
            return None
        except OSError as error:
            return failed("job_not_kept", f"Its request can't be read: {error.strerror or error}")
        except Exception as error:
            log.exception("job.broke", job=job.id, reason=str(error))
            return failed("internal_error", "llmux could not send it; its log says why.")
        finally:
            running.is_sending = False
            job.deaths -= 1
        return None if self.is_paused and answer.error is not None else answer  # perhaps because the daemon ends

    def _rest(self, job: Job, pause_s: float) -> None:
        def over() -> None:
            self._resting.discard(job.id)
            self._fill()

        job.state = "queued"
        self._resting.add(job.id)
        asyncio.get_running_loop().call_later(pause_s, over)

    async def _keep(self, job: Job, answer: Answer) -> None:
        """It has ended with this. Raises NotSavedError."""
        error = answer.error
        if error is None and job.keeps_end:
            try:
                self.make_room(len(answer.body))
                job.result_bytes = len(answer.body)  # at once: others look for room while it is written
                await self._write(job, "result", answer.body)
            except (NotSavedError, JobFullError, TooLargeError) as refused:
                job.result_bytes = None
                message = f"Its result can't be kept: {refused.message}"[:MESSAGE_LIMIT]
                error = {"message": message, "code": "job_not_kept"}
        try:
            await self._end(job, "completed" if error is None else "failed", answer, error)
        except NotSavedError:
            self._drop_result(job)
            raise

    async def _end(
        self, job: Job, state: JobState, answer: Answer | None = None, error: dict[str, Any] | None = None
    ) -> None:
        """It is over once that is on disk. Raises NotSavedError: it isn't, and nothing has changed."""
        over = replace(job, state=state, ended_at=round(time.time(), 3), request_bytes=0, error=error)
        if answer is not None:
            over.status, over.content_type = answer.status, answer.content_type
        for listener in self.on_end:
            await listener(over, answer)
        if job.keeps_end:
            await self._save(over)
            self._unlink(job, "request")
        for changed in ("state", "ended_at", "request_bytes", "error", "status", "content_type"):
            setattr(job, changed, getattr(over, changed))
        log.info("job.ended", job=job.id, state=state, endpoint=job.endpoint, model=job.model, tries=job.tries)
        if job.keeps_end:
            self.tell()
            return
        del self._all[job.id]  # at once: who follows its response looks for it
        try:
            await self._forget([job])
        except NotSavedError as refused:
            log.warning(
                "job.not_kept",
                job=job.id,
                reason=refused.message,
                consequence="its response or batch says how it ended",
            )

    def tell(self) -> None:
        """Wake whoever waits in `changed`."""
        self._places = None
        self._changed.set()
        self._changed = asyncio.Event()

    # -------------------------------------------------------------------------------------------------------------- disk

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.expire()

    async def expire(self) -> None:
        """Forget what has been kept long enough, and of too many the oldest."""
        before = time.time() - self.config.jobs_keep_s
        over = [job for job in self._all.values() if job.ended_at is not None]
        surplus = len(over) - MOST_ENDED
        old = [job for place, job in enumerate(over) if place < surplus or (job.ended_at or 0) <= before]
        try:
            await self._forget(old)
        except NotSavedError as error:
            log.warning("job.not_kept", reason=error.message)

    def make_room(self, size: int) -> None:
        """For so many bytes more, also of a file. Raises JobFullError where there is none (what waits and runs stays), TooLargeError where there can't be any."""
        if size > (budget := self.config.jobs_mib << 20):
            raise TooLargeError(f"It is larger than all that jobs may take (limits.jobs_mib: {self.config.jobs_mib}).")
        taken = sum(job.request_bytes + (job.result_bytes or 0) for job in self._all.values())
        missing = taken + sum(self._coming.values()) + self.files.taken + size - budget
        old = [job for job in self._all.values() if job.is_over and job.result_bytes]
        if missing > sum(job.result_bytes or 0 for job in old):  # then none of them goes for nothing
            raise JobFullError("Jobs take all the disk that they may (limits.jobs_mib).", retry_after_s=LONGEST_PAUSE_S)
        for job in old:
            if missing <= 0:
                return
            missing -= job.result_bytes or 0
            self._drop_result(job)

    def _drop_result(self, job: Job) -> None:
        self._unlink(job, "result")
        job.result_bytes = None

    async def _write(self, job: Job, kind: str, data: Bytes) -> None:
        def write() -> None:
            with replacing(path, 0o600) as new:
                new.write_bytes(data)

        path = self._path(job, kind)
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise NotSavedError(f"{path} can't be written: {error.strerror or error}") from error

    def _unlink(self, job: Job, kind: str) -> None:
        with contextlib.suppress(OSError):  # the next `open` removes what is left
            self._path(job, kind).unlink()

    def _path(self, job: Job, kind: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{job.id}.{kind}"

    async def _saved(self, job: Job) -> bool:
        """False: it can't be, and the log says why."""
        try:
            await self._save(job)
        except NotSavedError as error:
            log.warning("job.not_kept", job=job.id, reason=error.message)
            return False
        return True

    async def _save(self, job: Job) -> None:
        await self._change({(_COLLECTION, job.id): msgspec.to_builtins(job)})

    async def _change(self, entries: Mapping[Entry, JsonValue]) -> None:
        assert self._store is not None
        async with self._store.transaction() as changes:
            changes.update(entries)

    async def _forget(self, jobs: Sequence[Job]) -> None:
        """Raises NotSavedError: then they stay, without their results."""
        if not jobs:
            return
        gone: dict[Entry, JsonValue] = {(_COLLECTION, job.id): None for job in jobs}
        try:
            await self._change(gone)
        except NotSavedError:
            for job in jobs:  # perhaps the disk is full of them
                self._drop_result(job)
            await self._change(gone)
        for job in jobs:
            self._all.pop(job.id, None)
            for kind in ("request", "result"):
                self._unlink(job, kind)
        self.tell()
