"""Inference requests whose clients don't wait: jobs of clients, responses in the background, and lines of batches.

They are kept on disk, with their results, over restarts. A job waits until one of `jobs_running` places is free; then its request
goes the way of all others, with its client's priority and limits. The next place is for the key that has the fewest. What was
running when the daemon ended is run again, unless the daemon died of it, or with it, `DEATHS` times. What is refused for now, by a
full queue or a rate limit, gives its place back and is tried again. When the disk that jobs may take is full, the oldest results
go.

A job is over when that is on disk, and not before: clients never see an end that a restart takes back. One whose end can't be
written down waits, and is sent again.

The lines of batches get a place only when no other job wants it, and leave one free, if there are several.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog
from msgspec.structs import replace

from supervisor.catalog.sections.sections import JobsConfig
from supervisor.errors import NotFoundError, TooLargeError, UnavailableError
from supervisor.gateway.request import Request
from supervisor.host.store.files import replacing
from supervisor.host.store.request_buffer import Bytes, RequestBuffer
from supervisor.host.store.store import NotSavedError
from supervisor.jobs.files import Files
from supervisor.jobs.job import Inference, Line, Response
from supervisor.jobs.jobs import Jobs, Kind, Progress
from supervisor.schema.job import State

TRIES: Final = 20
"""So often a job is sent whose answer says `retry-after`."""
DEATHS: Final = 3
"""So often the daemon may die while a job is sent: perhaps it is the job that kills it."""
LONGEST_PAUSE_S: Final = 60.0
MESSAGE_LIMIT: Final = 1000

log = structlog.get_logger("llmux.jobs")


class JobInterruptedError(Exception):
    """The daemon ends, or another one takes over: the job is to be run again."""


class JobFullError(UnavailableError):
    """No further job is taken now."""

    code = "queue_full"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of sending a job's request once."""

    status: int
    content_type: str
    body: Bytes
    error: dict[str, Any] | None = None  # set iff it failed
    retry_after_s: float | None = None  # set iff it may be sent again
    buffer: RequestBuffer | None = None  # counts the body; release it when that is kept


def failed(code: str, message: str, retry_after_s: float | None = None) -> Answer:
    """An answer of llmux itself."""
    return Answer(500, "", b"", {"message": message, "code": code}, retry_after_s)


Send = Callable[[Inference, bytes], Awaitable[Answer]]
"""Sends a job's request, with its body, of which nobody else keeps anything. Raises JobInterruptedError. Cancelled, it gives the worker up at once."""
KeepEnd = Callable[[Any, Answer | None], Awaitable[None]]
"""Writes down how a job ended, with its answer; None: it was cancelled. Raises NotSavedError: then the job is not over."""


@dataclass(slots=True)
class Running:
    """A job that has a place."""

    is_sending: bool = False
    is_stopped: bool = False
    is_cancelled: bool = False  # by its client, not by the daemon's end
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Cut it only while it is sent: its answer is kept, and the task ends by itself."""
        self.is_stopped = True
        if self.is_sending and self.task is not None:
            self.is_sending = False
            self.task.cancel()


@dataclass(slots=True)
class InferenceJobs:
    """One for each daemon. Use from the event loop's thread."""

    jobs: Jobs
    files: Files  # which share the disk that jobs may take
    find_request: Callable[[str], object] = lambda _: None
    """The request of this id, if it is under way."""
    config: JobsConfig = field(default_factory=JobsConfig)
    on_end: dict[type[Inference], KeepEnd] = field(default_factory=dict)
    is_usable: bool = False  # can jobs be kept? Not before `open`
    is_paused: bool = True
    """None begins, nor goes on: the daemon is about to end, or to hand over."""
    _folder: Path = field(init=False)
    _send: Send | None = None
    _coming: dict[str, int] = field(default_factory=dict)  # bytes of those that are being written
    _running: dict[str, Running] = field(default_factory=dict)
    _resting: set[str] = field(default_factory=set)  # that were refused for now
    _places: dict[str, int] = field(default_factory=dict)  # of those that wait, in their line
    _counted: int = -1  # the version of the jobs when `_places` was made

    def __post_init__(self) -> None:
        for kind in (Inference, Response, Line):
            self.jobs.kinds[kind] = Kind(
                self.cancel, self._progress, keep_s=lambda: self.config.jobs_keep_s, forget=self._remove_files
            )

    # -------------------------------------------------------------------------------------------------- begin and end

    def open(self, folder: Path) -> None:
        """Go on with the jobs that were read. Blocks on a folder. One that can't be used is logged, and no jobs are taken."""
        self._folder = folder / "jobs"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = {path.name: path for path in self._folder.iterdir()}
        except OSError as error:
            log.warning("jobs.unusable", folder=str(self._folder), reason=str(error), consequence="no jobs are taken")
            files = {}
        else:
            self.is_usable = True
        for job in self.jobs.of(Inference):
            if not job.is_over:
                job.state = "queued"  # if it was running when the daemon ended
            elif job.result_bytes is not None and self._path(job, "result").name not in files:
                job.result_bytes = None
            files.pop(self._path(job, "result" if job.is_over else "request").name, None)
        for path in files.values() if self.jobs.are_known else ():
            with contextlib.suppress(OSError):
                path.unlink()

    def start(self, send: Send) -> None:
        """Send the requests of those that wait, now and later."""
        self._send = send
        self.go_on()

    def go_on(self) -> None:
        """Begin those for which there is a place, also after a pause."""
        self.is_paused = False
        self._fill()

    async def close(self) -> None:
        """Stop all that run: they are run again after the next `open` or `go_on`."""
        self.is_paused = True
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
        make: Callable[..., Inference] = Inference,
    ) -> Inference:
        """A new job of this kind. Raises JobFullError, TooLargeError, and NotSavedError."""
        if not self.is_usable:
            raise UnavailableError("Jobs can't be kept; the log says why.")
        await self.jobs.expire(Inference)
        job = make(
            id=f"job_{secrets.token_hex(12)}",
            created_at=round(time.time(), 3),
            owner=owner,
            model=model,
            endpoint=endpoint,
            headers=headers,
            request_bytes=len(body),
        )
        waiting = sum(not (each.is_over or isinstance(each, Line)) for each in self.jobs.of(Inference))
        waiting += len(self._coming)
        is_full = not isinstance(job, Line) and waiting >= self.config.jobs_waiting + self.config.jobs_running
        if is_full or self.config.jobs_waiting == 0:
            raise JobFullError(f"{waiting} jobs wait already (limits.jobs_waiting).", retry_after_s=LONGEST_PAUSE_S)
        self.make_room(len(body))
        self._coming[job.id] = len(body)
        try:
            await self._write(job, "request", body)
            await self.jobs.save(job)
        except BaseException:
            self._unlink(job, "request")
            raise
        finally:
            del self._coming[job.id]
        self.jobs.add(job)
        self._fill()
        return job

    def generating(self, response: str) -> Response | None:
        """The job that generates this response; None: it is over."""
        return next((job for job in self.jobs.of(Response) if job.response == response), None)

    def request_of(self, job: Inference) -> Request | None:
        """Its request that is under way; None between two tries."""
        found = self.find_request(job.request_id) if job.state == "running" else None
        return found if isinstance(found, Request) else None

    def ahead(self, job: Inference) -> int:
        """How many of those that wait come before it."""
        if self._counted != self.jobs.version:
            waiting = [other for other in self.jobs.of(Inference) if other.state == "queued"]
            waiting.sort(key=lambda other: isinstance(other, Line))
            self._places = {other.id: place for place, other in enumerate(waiting)}
            self._counted = self.jobs.version
        return self._places.get(job.id, 0)

    async def result(self, job: Inference) -> BinaryIO:
        """The file with the body of the answer; close it. Raises NotFoundError if it is gone."""
        try:
            return await asyncio.to_thread(self._path(job, "result").open, "rb")
        except OSError as error:
            raise NotFoundError(f"The result of {job.id} is gone.", code="job_result_gone") from error

    async def cancel(self, job: Inference) -> None:
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

    # --------------------------------------------------------------------------------------------------------- their way

    def _fill(self) -> None:
        """Use every free place."""
        if self._send is None or self.is_paused or not self.is_usable:
            return
        if (free := self.config.jobs_running - len(self._running)) <= 0:
            return
        waiting: dict[bool, dict[str | None, deque[Inference]]] = {False: {}, True: {}}  # is it a line, by key
        busy: Counter[str | None] = Counter()
        for_lines = max(1, self.config.jobs_running - 1)
        for job in self.jobs.of(Inference):
            if job.id in self._running:
                busy[job.owner] += 1
                for_lines -= isinstance(job, Line)
            elif job.state == "queued" and job.id not in self._resting:
                waiting[isinstance(job, Line)].setdefault(job.owner, deque()).append(job)
        for is_line, places in ((False, free), (True, for_lines)):
            queues = waiting[is_line]
            for _ in range(min(free, places, sum(map(len, queues.values())))):
                oldest = (queue[0] for queue in queues.values() if queue)
                job = queues[min(oldest, key=lambda one: (busy[one.owner], one.created_at)).owner].popleft()
                busy[job.owner] += 1
                free -= 1
                self._begin(job)

    def _begin(self, job: Inference) -> Running:
        running = self._running[job.id] = Running()
        running.task = asyncio.create_task(self._run(job, running))
        return running

    async def _run(self, job: Inference, running: Running) -> None:
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
            if answer is not None and answer.buffer is not None:
                answer.buffer.release()
            del self._running[job.id]
            self.jobs.wake()
            self._fill()

    async def _answer(self, job: Inference, running: Running) -> Answer | None:
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
            self.jobs.wake()
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

    def _rest(self, job: Inference, pause_s: float) -> None:
        def over() -> None:
            self._resting.discard(job.id)
            self._fill()

        job.state = "queued"
        self._resting.add(job.id)
        asyncio.get_running_loop().call_later(pause_s, over)

    async def _keep(self, job: Inference, answer: Answer) -> None:
        """It has ended with this. Raises NotSavedError."""
        error = answer.error
        if error is None and job.keeps_result:
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
        self, job: Inference, state: State, answer: Answer | None = None, error: dict[str, Any] | None = None
    ) -> None:
        """It is over once that is on disk. Raises NotSavedError: it isn't, and nothing has changed."""
        changes: dict[str, Any] = {
            "state": state,
            "ended_at": round(time.time(), 3),
            "request_bytes": 0,
            "error": error,
        }
        if answer is not None:
            changes |= {"status": answer.status, "content_type": answer.content_type}
        over = replace(job, **changes)
        if (keep := self.on_end.get(type(job))) is not None:
            await keep(over, answer)
        if job.keeps_result:
            await self.jobs.save(over)
            self._unlink(job, "request")
        for name, value in changes.items():
            setattr(job, name, value)
        log.info("job.ended", job=job.id, state=state, endpoint=job.endpoint, model=job.model, tries=job.tries)
        if job.keeps_result:
            self.jobs.wake()
            return
        self.jobs.drop(job)  # at once: who follows its response looks for it
        try:
            await self.jobs.forget([job])
        except NotSavedError as refused:
            consequence = "its response or batch says how it ended"
            log.warning("job.not_kept", job=job.id, reason=refused.message, consequence=consequence)

    def _progress(self, job: Inference) -> Progress:
        if job.state == "completed":
            return Progress(1.0)
        request = self.request_of(job)
        step = None if request is None else request.attempt.step
        return Progress() if step is None or not step.steps else Progress(step.step / step.steps)

    # -------------------------------------------------------------------------------------------------------------- disk

    def make_room(self, size: int) -> None:
        """For so many bytes more, also of a file. Raises JobFullError where there is none (what waits and runs stays), TooLargeError where there can't be any."""
        if size > (budget := self.config.jobs_mib << 20):
            raise TooLargeError(f"It is larger than all that jobs may take (limits.jobs_mib: {self.config.jobs_mib}).")
        taken = sum(job.disk_bytes for job in self.jobs.of(Inference))
        missing = taken + sum(self._coming.values()) + self.files.taken + size - budget
        if missing <= 0:
            return
        old = [job for job in self.jobs.of(Inference) if job.is_over and job.result_bytes]
        if missing > sum(job.result_bytes or 0 for job in old):  # then none of them goes for nothing
            raise JobFullError("Jobs take all the disk that they may (limits.jobs_mib).", retry_after_s=LONGEST_PAUSE_S)
        for job in old:
            if missing <= 0:
                return
            missing -= job.result_bytes or 0
            self._drop_result(job)

    def _drop_result(self, job: Inference) -> None:
        self._unlink(job, "result")
        job.result_bytes = None

    def _remove_files(self, jobs: Sequence[Inference]) -> None:
        for job in jobs:
            self._drop_result(job)
            self._unlink(job, "request")

    async def _write(self, job: Inference, kind: str, data: Bytes) -> None:
        def write() -> None:
            with replacing(path, 0o600) as new:
                new.write_bytes(data)

        path = self._path(job, kind)
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise NotSavedError(f"{path} can't be written: {error.strerror or error}") from error

    def _unlink(self, job: Inference, kind: str) -> None:
        with contextlib.suppress(OSError):  # the next `open` removes what is left
            self._path(job, kind).unlink()

    def _path(self, job: Inference, kind: str) -> Path:
        return self._folder / f"{job.id}.{kind}"

    async def _saved(self, job: Inference) -> bool:
        """False: it can't be, and the log says why."""
        try:
            await self.jobs.save(job)
        except NotSavedError as error:
            log.warning("job.not_kept", job=job.id, reason=error.message)
            return False
        return True
