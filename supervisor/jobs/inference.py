"""Inference requests whose clients don't wait: jobs of clients, responses in the background, and lines of batches.

Jobs and their results are on disk, and survive restarts. A job waits for one of `jobs_running` slots. Then its request is handled
as any other request, with its client's priority and limits. The next slot goes to the key with the fewest running jobs. A job that
was running when the daemon ended is run again, unless the daemon died `DEATHS` times while the job ran. A job that is refused
temporarily, by a full queue or a rate limit, gives its slot back and is tried again. When the disk budget of jobs is full, the
oldest results are deleted.

A job is over only when its end is on disk: so clients never see an end that a restart reverts. A job whose end can't be written
waits, and is sent again.

Lines of batches get a slot only if no other job waits for it. They leave one slot free, if there are several.
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
"""The most tries of a job whose answers have `retry-after`."""
DEATHS: Final = 3
"""A job is given up after so many deaths of the daemon while the job was sent: the job may be the cause."""
LONGEST_PAUSE_S: Final = 60.0
MESSAGE_LIMIT: Final = 1000

log = structlog.get_logger("llmux.jobs")


class JobInterruptedError(Exception):
    """The daemon ends, or another daemon takes over: the job must be run again."""


class JobFullError(UnavailableError):
    """No further job is accepted now."""

    code = "queue_full"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of sending a job's request once."""

    status: int
    content_type: str
    body: Bytes
    error: dict[str, Any] | None = None  # set iff the request failed
    retry_after_s: float | None = None  # set iff the job may be sent again
    buffer: RequestBuffer | None = None  # accounts for the body; release it once the body is on disk


def failed(code: str, message: str, retry_after_s: float | None = None) -> Answer:
    """A failure by llmux itself, not by the worker."""
    return Answer(500, "", b"", {"message": message, "code": code}, retry_after_s)


Send = Callable[[Inference, bytes], Awaitable[Answer]]
"""Sends a job's request with this body, which it may consume. Raises JobInterruptedError. If cancelled, it releases the worker at once."""
KeepEnd = Callable[[Any, Answer | None], Awaitable[None]]
"""Stores the outcome of a job; None as the answer: the job was cancelled. Raises NotSavedError: then the job is not over."""


@dataclass(slots=True)
class Running:
    """A job in a slot."""

    is_sending: bool = False
    is_stopped: bool = False
    is_cancelled: bool = False  # by its client, not by the daemon's end
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Cancel the task, but only while it sends the request. An answer that has come is kept, and the task ends by itself."""
        self.is_stopped = True
        if self.is_sending and self.task is not None:
            self.is_sending = False
            self.task.cancel()


@dataclass(slots=True)
class InferenceJobs:
    """One for each daemon. Use from the event loop's thread."""

    jobs: Jobs
    files: Files  # these share the disk budget of jobs
    find_request: Callable[[str], object] = lambda _: None
    """The running request with this id."""
    config: JobsConfig = field(default_factory=JobsConfig)
    on_end: dict[type[Inference], KeepEnd] = field(default_factory=dict)
    is_usable: bool = False  # whether jobs can be stored; False before `open`
    is_paused: bool = True
    """No job starts or is retried: the daemon is about to end, or to hand over."""
    _folder: Path = field(init=False)
    _send: Send | None = None
    _being_written: dict[str, int] = field(default_factory=dict)  # job id → bytes of a request that is being written
    _running: dict[str, Running] = field(default_factory=dict)
    _awaiting_retry: set[str] = field(default_factory=set)  # ids of jobs that wait before a retry
    _positions: dict[str, int] = field(default_factory=dict)  # job id → position in the queue
    _positions_version: int = -1  # `jobs.version` when `_positions` was computed

    def __post_init__(self) -> None:
        for kind in (Inference, Response, Line):
            self.jobs.kinds[kind] = Kind(
                self.cancel, self._progress, keep_s=lambda: self.config.jobs_keep_s, forget=self._remove_files
            )

    # --------------------------------------------------------------------------------------------------- start and stop

    def open(self, folder: Path) -> None:
        """Queue the stored jobs again. Reads a folder, which blocks. An unusable folder is logged, and then no jobs are accepted."""
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
            elif job.result_bytes is not None and self._path_of(job, "result").name not in files:
                job.result_bytes = None
            files.pop(self._path_of(job, "result" if job.is_over else "request").name, None)
        for path in files.values() if self.jobs.are_known else ():
            with contextlib.suppress(OSError):
                path.unlink()

    def start(self, send: Send) -> None:
        """Begin to send the requests of waiting jobs."""
        self._send = send
        self.go_on()

    def go_on(self) -> None:
        """Start as many jobs as there are free slots, also after `close`."""
        self.is_paused = False
        self._fill_slots()

    async def close(self) -> None:
        """Stop all running jobs. They are run again after the next `open` or `go_on`."""
        self.is_paused = True
        for running in self._running.values():
            running.stop()
        if tasks := [running.task for running in self._running.values() if running.task is not None]:
            await asyncio.wait(tasks)

    def configure(self, config: JobsConfig) -> None:
        """Apply new limits."""
        self.config = config
        self._fill_slots()

    # ------------------------------------------------------------------------------------------------------ for clients

    async def add(
        self,
        endpoint: str,
        model: str | None,
        headers: dict[str, str],
        body: Bytes,
        owner: str | None,
        make: Callable[..., Inference] = Inference,
    ) -> Inference:
        """Create a job of the class `make`. Raises JobFullError, TooLargeError, and NotSavedError."""
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
        waiting += len(self._being_written)
        is_full = not isinstance(job, Line) and waiting >= self.config.jobs_waiting + self.config.jobs_running
        if is_full or self.config.jobs_waiting == 0:
            raise JobFullError(f"{waiting} jobs wait already (limits.jobs_waiting).", retry_after_s=LONGEST_PAUSE_S)
        self.make_room(len(body))
        self._being_written[job.id] = len(body)
        try:
            await self._write(job, "request", body)
            await self.jobs.save(job)
        except BaseException:
            self._unlink(job, "request")
            raise
        finally:
            del self._being_written[job.id]
        self.jobs.add(job)
        self._fill_slots()
        return job

    def generating(self, response: str) -> Response | None:
        """The job that generates this response; None: the job is over."""
        return next((job for job in self.jobs.of(Response) if job.response == response), None)

    def request_of(self, job: Inference) -> Request | None:
        """The job's running request; None between two tries."""
        found = self.find_request(job.request_id) if job.state == "running" else None
        return found if isinstance(found, Request) else None

    def ahead(self, job: Inference) -> int:
        """The number of waiting jobs before this one."""
        if self._positions_version != self.jobs.version:
            waiting = [other for other in self.jobs.of(Inference) if other.state == "queued"]
            waiting.sort(key=lambda other: isinstance(other, Line))
            self._positions = {other.id: position for position, other in enumerate(waiting)}
            self._positions_version = self.jobs.version
        return self._positions.get(job.id, 0)

    async def result(self, job: Inference) -> BinaryIO:
        """Open the file with the body of the answer; the caller closes it. Raises NotFoundError if it is gone."""
        try:
            return await asyncio.to_thread(self._path_of(job, "result").open, "rb")
        except OSError as error:
            raise NotFoundError(f"The result of {job.id} is gone.", code="job_result_gone") from error

    async def cancel(self, job: Inference) -> None:
        """Cancel a job in any state. A job that is over, or has its answer already, stays as it is.

        Raises NotSavedError if the end can't be written: then the job waits, and is sent again.
        """
        if job.is_over:
            return
        running = self._running.get(job.id) or self._start_job(job)  # so that a waiting job can't start meanwhile
        running.is_cancelled = True
        running.stop()
        assert running.task is not None
        await asyncio.wait([running.task])  # unlike `await task`, doesn't cancel the task with this one
        if not job.is_over:
            raise NotSavedError(f"{job.id} can't be cancelled: that can't be written down now, so it is sent again.")

    async def remove(self, job: Inference) -> None:
        """Cancel a job, and delete it with its files. Raises NotSavedError."""
        await self.cancel(job)
        await self.jobs.forget([job])

    # ------------------------------------------------------------------------------------------------------- processing

    def _fill_slots(self) -> None:
        """Start waiting jobs in all free slots."""
        if self._send is None or self.is_paused or not self.is_usable:
            return
        if (free := self.config.jobs_running - len(self._running)) <= 0:
            return
        waiting: dict[bool, dict[str | None, deque[Inference]]] = {False: {}, True: {}}  # by is_line, then by key
        busy: Counter[str | None] = Counter()
        for_lines = max(1, self.config.jobs_running - 1)
        for job in self.jobs.of(Inference):
            if job.id in self._running:
                busy[job.owner] += 1
                for_lines -= isinstance(job, Line)
            elif job.state == "queued" and job.id not in self._awaiting_retry:
                waiting[isinstance(job, Line)].setdefault(job.owner, deque()).append(job)
        for is_line, slots in ((False, free), (True, for_lines)):
            queues = waiting[is_line]
            for _ in range(min(free, slots, sum(map(len, queues.values())))):
                oldest = (queue[0] for queue in queues.values() if queue)
                job = queues[min(oldest, key=lambda one: (busy[one.owner], one.created_at)).owner].popleft()
                busy[job.owner] += 1
                free -= 1
                self._start_job(job)

    def _start_job(self, job: Inference) -> Running:
        running = self._running[job.id] = Running()
        running.task = asyncio.create_task(self._run(job, running))
        return running

    async def _run(self, job: Inference, running: Running) -> None:
        answer = None
        try:
            answer = None if running.is_stopped else await self._send_once(job, running)
            pause_s = 0.0 if answer is None else answer.retry_after_s if job.tries < TRIES else None
            if pause_s is not None:
                await self._try_save(job)
            if running.is_cancelled:
                await self._finish(job, "cancelled")
            elif answer is None or pause_s is not None:
                self._retry_after(job, min(pause_s or 0.0, LONGEST_PAUSE_S))
            else:
                await self._finish_with(job, answer)
        except NotSavedError as error:
            log.warning("job.not_kept", job=job.id, reason=error.message, consequence="it is sent again")
            self._retry_after(job, LONGEST_PAUSE_S)
        finally:
            if answer is not None and answer.buffer is not None:
                answer.buffer.release()
            del self._running[job.id]
            self.jobs.wake()
            self._fill_slots()

    async def _send_once(self, job: Inference, running: Running) -> Answer | None:
        """Send the job's request once. None: the job was stopped."""
        if job.deaths >= DEATHS:
            return failed("job_given_up", f"llmux died {DEATHS} times while it sent this job; the log may say why.")
        job.tries += 1
        job.deaths += 1  # until the daemon has survived this try
        try:
            if not await self._try_save(job):
                return failed("job_not_kept", "Its start can't be written down; the log says why.", LONGEST_PAUSE_S)
            if running.is_stopped:
                return None
            job.state, job.started_at = "running", round(time.time(), 3)
            self.jobs.wake()
            running.is_sending = True
            assert self._send is not None
            answer = await self._send(job, await asyncio.to_thread(self._path_of(job, "request").read_bytes))
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
        return None if self.is_paused and answer.error is not None else answer  # the end of the daemon may be the cause

    def _retry_after(self, job: Inference, pause_s: float) -> None:
        """Queue the job again, to be sent after the pause."""

        def end_pause() -> None:
            self._awaiting_retry.discard(job.id)
            self._fill_slots()

        job.state = "queued"
        self._awaiting_retry.add(job.id)
        asyncio.get_running_loop().call_later(pause_s, end_pause)

    async def _finish_with(self, job: Inference, answer: Answer) -> None:
        """End the job with this answer, and write its result to disk. Raises NotSavedError."""
        error = answer.error
        if error is None and job.keeps_result:
            try:
                self.make_room(len(answer.body))
                job.result_bytes = len(answer.body)  # at once: it counts for other jobs that need space meanwhile
                await self._write(job, "result", answer.body)
            except (NotSavedError, JobFullError, TooLargeError) as refused:
                job.result_bytes = None
                message = f"Its result can't be kept: {refused.message}"[:MESSAGE_LIMIT]
                error = {"message": message, "code": "job_not_kept"}
        try:
            await self._finish(job, "completed" if error is None else "failed", answer, error)
        except NotSavedError:
            self._drop_result(job)
            raise

    async def _finish(
        self, job: Inference, state: State, answer: Answer | None = None, error: dict[str, Any] | None = None
    ) -> None:
        """End the job, once its end is on disk. Raises NotSavedError: then nothing has changed."""
        changes: dict[str, Any] = {
            "state": state,
            "ended_at": round(time.time(), 3),
            "request_bytes": 0,
            "error": error,
        }
        if answer is not None:
            changes |= {"status": answer.status, "content_type": answer.content_type}
        ended = replace(job, **changes)
        if (keep := self.on_end.get(type(job))) is not None:
            await keep(ended, answer)
        if job.keeps_result:
            await self.jobs.save(ended)
            self._unlink(job, "request")
        for name, value in changes.items():
            setattr(job, name, value)
        log.info("job.ended", job=job.id, state=state, endpoint=job.endpoint, model=job.model, tries=job.tries)
        if job.keeps_result:
            self.jobs.wake()
            return
        self.jobs.drop(job)  # at once: readers of its response check whether the job exists
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

    # ------------------------------------------------------------------------------------------------------------- disk

    def make_room(self, size: int) -> None:
        """Free disk space for so many bytes, also of a file, by deleting the oldest results.

        Raises JobFullError if that isn't enough (nothing is deleted then), TooLargeError for more bytes than the whole budget.
        """
        if size > (budget := self.config.jobs_mib << 20):
            raise TooLargeError(f"It is larger than all that jobs may take (limits.jobs_mib: {self.config.jobs_mib}).")
        taken = sum(job.disk_bytes for job in self.jobs.of(Inference))
        missing = taken + sum(self._being_written.values()) + self.files.disk_bytes + size - budget
        if missing <= 0:
            return
        old = [job for job in self.jobs.of(Inference) if job.is_over and job.result_bytes]
        if missing > sum(job.result_bytes or 0 for job in old):  # before any deletion
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

        path = self._path_of(job, kind)
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise NotSavedError(f"{path} can't be written: {error.strerror or error}") from error

    def _unlink(self, job: Inference, kind: str) -> None:
        with contextlib.suppress(OSError):  # the next `open` deletes leftovers
            self._path_of(job, kind).unlink()

    def _path_of(self, job: Inference, kind: str) -> Path:
        return self._folder / f"{job.id}.{kind}"

    async def _try_save(self, job: Inference) -> bool:
        """Write the job's record. False: that failed, and the failure was logged."""
        try:
            await self.jobs.save(job)
        except NotSavedError as error:
            log.warning("job.not_kept", job=job.id, reason=error.message)
            return False
        return True
