"""Batches: files of requests. Each line becomes a job (`jobs.inference`), by default with the least urgent priority.

First all lines of a batch's file are validated; one mistake refuses the whole file. Then the lines become jobs, as many at a
time as keep the job slots busy. The outcome of each line is appended to the batch's output file or error file. A line is done
when that is on disk; its job is deleted later. So after a restart the two files show which lines are done, and only the other
lines are sent. At the end one transaction writes the batch and its two files to the store.

A batch ends when all lines are done, when it is cancelled, or when its window is over. Ended batches are deleted after
`jobs_keep_s`. So are files, but not while a running batch reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import structlog
from pydantic import JsonValue

from supervisor.core.demand import LEAST_URGENT
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError, TooLargeError, UnavailableError
from supervisor.host.store.request_buffer import BodyBudget, Bytes, RequestBuffer
from supervisor.host.store.store import Entry, NotSavedError, Store
from supervisor.jobs import batch_file as lines
from supervisor.jobs.batch_file import Lines
from supervisor.jobs.files import MOST, File, Files, new_id
from supervisor.jobs.inference import LONGEST_PAUSE_S, Answer, InferenceJobs, JobFullError
from supervisor.jobs.job import Batch, Line, Problem
from supervisor.jobs.jobs import Jobs, Kind, Progress

LOOK_S: Final = 1.0
MOST_PROBLEMS: Final = 100
"""The most mistakes that are reported for a file."""
_PRIORITY: Final = "x-priority"

Ending = Literal["completed", "failed", "expired", "cancelled"]
Check = Callable[[str, Bytes], Awaitable[tuple[str | None, Bytes]]]
"""Checks a request to this endpoint. Returns the model and the body to send as a job. Raises LlmuxError."""

log = structlog.get_logger("llmux.jobs")


@dataclass(slots=True)
class Work:
    """The progress of a batch that isn't over."""

    batch: Batch
    output: File
    errors: File
    done: bytearray = field(default_factory=bytearray)  # by line number; empty until the file is validated
    in_flight: dict[int, str] = field(default_factory=dict)  # line number → job id; empty id: the job is being added
    completed: int = 0
    failed: int = 0
    is_stopping: bool = False  # the jobs in flight are being cancelled, which is not recorded
    ending: Ending | None = None  # set iff only the final write is missing
    is_recovered: asyncio.Event = field(default_factory=asyncio.Event)  # the output files were read after a restart

    def is_done(self, number: int) -> bool:
        """Whether the outcome of this line is on disk."""
        return number < len(self.done) and self.done[number] != 0


@dataclass(slots=True)
class Batches:
    """One for each daemon. Use from the event loop's thread."""

    inference: InferenceJobs
    bodies: BodyBudget
    line_limit: int = 32 << 20  # bytes
    is_paused: bool = True
    jobs: Jobs = field(init=False)
    files: Files = field(init=False)
    _check: Check | None = None
    _work: dict[str, Work] = field(default_factory=dict)  # by batch
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs, self.files = self.inference.jobs, self.inference.files
        self.jobs.kinds[Batch] = Kind(self.cancel, self._progress, MOST, lambda: self.inference.config.jobs_keep_s)
        self.jobs.on_sweep.append(self._expire_files)
        self.inference.on_end[Line] = self._record_end

    # --------------------------------------------------------------------------------------------------- start and stop

    def open(self, store: Store, folder: Path, owners: Mapping[str, str] | None = None) -> None:
        """Continue the stored batches and files. Blocks on a folder. `owners`: see `former_owners`."""
        self._work = {batch.id: _new_work(batch) for batch in self.jobs.of(Batch) if not batch.is_over}
        growing = [file for work in self._work.values() for file in (work.output, work.errors)]
        self.files.open(store, folder, growing, owners)

    def start(self, check: Check) -> None:
        """Begin to send lines of batches that aren't over. Call it before the jobs start."""
        self._check = check
        self.go_on()

    def go_on(self) -> None:
        """Run all batches that aren't over, also after `close`."""
        self.is_paused = False
        for job in self.jobs.of(Line):
            if (work := self._work.get(job.batch)) is not None:
                work.in_flight[job.number] = job.id
        for work in self._work.values():
            self._start_task(work)

    async def close(self) -> None:
        """Stop sending lines. Close the jobs after this: lines in flight are answered, or sent again later, as all jobs are."""
        self.is_paused = True
        self.jobs.wake()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _start_task(self, work: Work) -> None:
        name = work.batch.id
        task = self._tasks[name] = asyncio.create_task(self._run(work), name=name)
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    # ------------------------------------------------------------------------------------------------------ for clients

    async def add(
        self,
        endpoint: str,
        file: File,
        owner: str | None,
        *,
        window: str,
        window_s: float,
        headers: dict[str, str],
        metadata: dict[str, str] | None,
    ) -> Batch:
        """Create a batch of this file. Raises JobFullError, UnavailableError, and NotSavedError."""
        if not self.inference.is_usable or self.files.folder is None or self.is_paused:
            raise UnavailableError("Batches can't be kept now; the log says why.", retry_after_s=LOOK_S)
        if len(self._work) >= self.inference.config.jobs_waiting:
            message = f"{len(self._work)} batches aren't over yet (limits.jobs_waiting)."
            raise JobFullError(message, retry_after_s=LONGEST_PAUSE_S)
        if len(self.jobs.of(Batch)) >= MOST:
            raise JobFullError(f"{MOST} batches are kept already (limits.jobs_keep_s).", retry_after_s=LONGEST_PAUSE_S)
        now = round(time.time(), 3)
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            created_at=now,
            owner=owner,
            endpoint=endpoint,
            input_file=file.id,
            output_file=new_id(),
            error_file=new_id(),
            window=window,
            expires_at=now + window_s,
            headers={_PRIORITY: str(LEAST_URGENT)} | headers,
            metadata=metadata,
        )
        self.jobs.add(batch)  # at once, so that the file isn't deleted meanwhile
        try:
            await self.jobs.save(batch)
        except BaseException:
            self.jobs.drop(batch)
            raise
        work = self._work[batch.id] = _new_work(batch)
        for each in (work.output, work.errors):
            self.files.grow(each)
        self._start_task(work)
        return batch

    async def counts(self, batch: Batch) -> tuple[int, int]:
        """The numbers of answered and of failed requests."""
        work = self._work.get(batch.id)
        if work is None or batch.started_at is None:
            return batch.completed, batch.failed
        with contextlib.suppress(TimeoutError):  # after a restart the output files are read first
            async with asyncio.timeout(LOOK_S):
                await work.is_recovered.wait()
        return work.completed, work.failed

    async def cancel(self, batch: Batch) -> None:
        """Begin to cancel a batch: answers are kept, no more lines are sent. Raises InvalidRequestError, and NotSavedError."""
        status = batch.api_state
        if status in {"cancelling", "cancelled"}:
            return
        if batch.is_over or status == "finalizing":
            message = f"{batch.id} is {status}: it can't be cancelled any more."
            raise InvalidRequestError(message, code="batch_ended")
        await self.jobs.change(batch, cancelling_at=round(time.time(), 3))

    def _progress(self, batch: Batch) -> Progress:
        if batch.is_over:
            first = batch.problems[0].message if batch.problems else ""
            return Progress(1.0 if batch.state == "completed" else None, message=first)
        work = self._work.get(batch.id)
        return Progress() if work is None or not batch.total else Progress((work.completed + work.failed) / batch.total)

    async def remove_file(self, file: File) -> None:
        """Delete a file. Raises InvalidRequestError while a batch reads it, and NotSavedError."""
        for batch in self.jobs.of(Batch):
            if batch.input_file == file.id and not batch.is_over:
                message = f"{batch.id} reads this file: cancel it, or wait for its end."
                raise InvalidRequestError(message, code="file_in_use")
        await self.files.remove([file.id])

    def expiry_of(self, files: Iterable[File]) -> dict[str, float | None]:
        """The time at which each file expires, by id; None: a batch still reads it."""
        used: dict[str, float] = {}
        for batch in self.jobs.of(Batch):
            ended_at = math.inf if batch.ended_at is None else batch.ended_at
            used[batch.input_file] = max(ended_at, used.get(batch.input_file, 0.0))
        last = {file.id: max(file.created_at, used.get(file.id, 0.0)) for file in files}
        keep_s = self.inference.config.jobs_keep_s
        return {name: None if at == math.inf else at + keep_s for name, at in last.items()}

    async def is_done(self, job: Line) -> bool:
        """Whether the outcome of the job's line is on disk. If so, the daemon died before it could delete the job."""
        work = self._work.get(job.batch)
        if work is None:
            return True
        await work.is_recovered.wait()
        return work.is_done(job.number)

    # ------------------------------------------------------------------------------------------------------- processing

    async def _run(self, work: Work) -> None:
        batch = work.batch
        while not self.is_paused and not batch.is_over:
            try:
                await self._process(work)
            except NotSavedError as error:
                log.warning("batch.not_kept", batch=batch.id, reason=error.message, consequence="it is tried again")
                await self._pause_before_retry(batch)
            except Exception as error:
                log.exception("batch.broke", batch=batch.id, reason=str(error))
                await self._pause_before_retry(batch)

    async def _pause_before_retry(self, batch: Batch) -> None:
        until = time.monotonic() + LONGEST_PAUSE_S
        while not self.is_paused and batch.cancelling_at is None and time.monotonic() < until:
            await self.jobs.changed(LOOK_S)

    async def _process(self, work: Work) -> None:
        """Run a batch from its present state to its end, or until it is paused. Raises NotSavedError."""
        batch = work.batch
        if not work.is_recovered.is_set():
            await self._recover(work)
        ending = work.ending if batch.cancelling_at is None else "cancelled"
        if ending is not None:
            await self._finish(work, ending)
            return
        try:
            file = await self.files.open_file(batch.input_file)
        except NotFoundError as error:
            await self._finish(work, "failed", [Problem("file_not_found", error.message)])
            return
        with file:
            if batch.state == "queued":
                await self._validate(work, Lines(file, self.line_limit))
            if batch.state == "running":
                file.seek(0)
                await self._send_lines(work, Lines(file, self.line_limit))
            if self.is_paused or batch.is_over:
                return
            if batch.cancelling_at is not None:
                await self._finish(work, "cancelled")
            elif work.completed + work.failed < batch.total or batch.started_at is None:
                file.seek(0)
                await self._expire_lines(work, Lines(file, self.line_limit))
            else:
                await self._finish(work, "completed")

    def _should_stop(self, batch: Batch) -> bool:
        return self.is_paused or batch.cancelling_at is not None or time.time() >= batch.expires_at

    async def _recover(self, work: Work) -> None:
        """Find the done lines in the output files, after a restart. Raises NotSavedError."""
        batch = work.batch

        async def done_lines(file: File) -> list[int]:
            if not file.bytes:
                return []
            try:
                with await self.files.open_file(file.id) as content:
                    numbers, file.bytes = await asyncio.to_thread(lines.done_lines, content)
            except (OSError, NotFoundError) as error:
                raise NotSavedError(f"What is done of {batch.id} can't be read: {error}") from error
            return numbers

        completed, failed = await done_lines(work.output), await done_lines(work.errors)
        work.completed, work.failed = len(completed), len(failed)
        work.done = bytearray(batch.last_line + 1)
        for number in (*completed, *failed):
            if number <= batch.last_line:
                work.done[number] = 1
        work.is_recovered.set()

    async def _validate(self, work: Work, reading: Lines) -> None:
        """Read and check all lines once. Raises NotSavedError."""
        batch = work.batch
        problems: list[Problem] = []
        seen: set[bytes] = set()
        most = self.inference.config.batch_lines
        total = last = 0
        while not (self._should_stop(batch) or reading.is_at_end):
            for number, raw in await self._read(reading):
                last, total = number, total + 1
                if total > most:
                    message = f"The file has more than {most} requests (limits.batch_lines)."
                    await self._finish(work, "failed", [Problem("too_many_requests", message, None, number)])
                    return
                try:
                    await self._check_line(batch, raw, seen)
                except LlmuxError as error:
                    problems.append(Problem(error.code, error.message, error.param, number))
                if len(problems) >= MOST_PROBLEMS:
                    await self._finish(work, "failed", problems)
                    return
                await asyncio.sleep(0)
        if self._should_stop(batch):
            return
        if problems or not total:
            problems = problems or [Problem("empty_file", "The file has no requests.")]
            await self._finish(work, "failed", problems)
            return
        now = round(time.time(), 3)
        await self.jobs.change(batch, state="running", started_at=now, total=total, last_line=last)
        work.done = bytearray(last + 1)

    async def _read(
        self, reading: Lines, is_wanted: Callable[[int], bool] = lambda _: True, most: int = lines.PIECE
    ) -> list[tuple[int, bytes | None]]:
        """See `Lines.read`. Raises NotSavedError."""
        try:
            return await reading.read(is_wanted, most)
        except OSError as error:
            raise NotSavedError(f"The file of a batch can't be read: {error.strerror or error}") from error

    async def _check_line(self, batch: Batch, raw: bytes | None, seen: set[bytes]) -> None:
        """Raises LlmuxError for an invalid line."""
        buffer = RequestBuffer(self.bodies, raw or b"")
        buffer.keep(raw or b"")
        try:
            custom_id, body = await lines.open_line(raw, batch.endpoint)
            if (digest := lines.digest_of(custom_id)) in seen:
                message = f"custom_id {custom_id[:100]!r} is that of an earlier line."
                raise InvalidRequestError(message, code="duplicate_custom_id", param="custom_id")
            seen.add(digest)
            assert self._check is not None
            await self._check(batch.endpoint, body)
        finally:
            buffer.release()

    async def _send_lines(self, work: Work, reading: Lines) -> None:
        """Add the lines as jobs, and wait until they are done. Raises NotSavedError."""
        batch = work.batch

        def is_wanted(number: int) -> bool:
            return not work.is_done(number) and number not in work.in_flight

        while not self._should_stop(batch):
            if self._lines_in_flight()[batch.owner] >= 2 * self.inference.config.jobs_running:
                await self.jobs.changed(LOOK_S)
                continue
            for number, raw in await self._read(reading, is_wanted, 1):
                await self._send_line(work, number, raw)
            if reading.is_at_end:
                break
        while work.in_flight and not self._should_stop(batch):
            await self.jobs.changed(LOOK_S)

    def _lines_in_flight(self) -> Counter[str | None]:
        """The number of lines that are jobs now, by key."""
        found: Counter[str | None] = Counter()
        for work in self._work.values():
            found[work.batch.owner] += len(work.in_flight)
        return found

    async def _send_line(self, work: Work, number: int, raw: bytes | None) -> None:
        """Add a line as a job, as soon as there is room. Raises NotSavedError."""
        batch = work.batch
        buffer = RequestBuffer(self.bodies)
        buffer.keep(raw or b"")
        work.in_flight[number] = ""
        custom_id = ""
        try:
            custom_id, body = await lines.open_line(raw, batch.endpoint)
            assert self._check is not None
            model, body = await self._check(batch.endpoint, body)
            make = partial(Line, batch=batch.id, number=number, custom_id=custom_id)
            while not self._should_stop(batch):
                try:
                    job = await self.inference.add(batch.endpoint, model, batch.headers, body, batch.owner, make)
                except JobFullError:
                    await self.jobs.changed(LOOK_S)
                else:
                    work.in_flight[number] = job.id
                    return
        except NotSavedError:
            raise
        except LlmuxError as error:  # the configuration or a limit changed after the file was validated
            found = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
            await self._record(
                work, number, [lines.error_line(batch.id, number, custom_id, int(error.status), "", found)]
            )
        finally:
            buffer.release()
            if not work.in_flight.get(number, True):
                del work.in_flight[number]

    async def _record_end(self, job: Line, answer: Answer | None) -> None:
        """Record the outcome of a line's job; see `KeepEnd`."""
        if (work := self._work.get(job.batch)) is None:
            return
        await work.is_recovered.wait()
        if not work.is_done(job.number):
            about = (job.batch, job.number, job.custom_id)
            if answer is None:
                if not work.is_stopping:
                    why = lines.unsent_line(*about, "request_cancelled", "The job of this request was cancelled.")
                    await self._record(work, job.number, [why])
            elif answer.error is not None:
                error = lines.error_line(*about, answer.status, job.request_id, answer.error)
                await self._record(work, job.number, [error])
            else:
                await self._record_answer(work, job, answer)
        work.in_flight.pop(job.number, None)

    async def _record_answer(self, work: Work, job: Line, answer: Answer) -> None:
        about = (job.batch, job.number, job.custom_id)
        try:
            self.inference.make_room(len(answer.body))
            text = await asyncio.to_thread(lines.answer_line, *about, answer.status, job.request_id, answer.body)
        except (JobFullError, TooLargeError) as refused:
            why = {"message": f"Its result can't be kept: {refused.message}", "code": "job_not_kept"}
        except ValueError as error:
            why = {"message": f"The answer is not valid JSON: {error}.", "code": "upstream_error"}
        else:
            await self._record(work, job.number, text, is_answer=True)
            return
        await self._record(work, job.number, [lines.error_line(*about, 500, job.request_id, why)])

    async def _record(self, work: Work, number: int, text: list[Bytes], *, is_answer: bool = False) -> None:
        """Append the outcome of a line, and count the line as done. Raises NotSavedError."""
        file = work.output if is_answer else work.errors
        await self.files.append(file, text)
        work.done[number] = 1
        if is_answer:
            work.completed += 1
        else:
            work.failed += 1

    # ----------------------------------------------------------------------------------------------------------- ending

    async def _expire_lines(self, work: Work, reading: Lines) -> None:
        """Record each line that isn't done as expired, and end the batch. Raises NotSavedError."""
        batch = work.batch
        await self._cancel_jobs(work)
        message = "This request could not be executed before the completion window expired."
        while batch.started_at is not None and not reading.is_at_end:
            found = await self._read(reading, lambda number: not work.is_done(number))
            text: list[Bytes] = []
            for number, raw in found:
                with contextlib.suppress(LlmuxError):
                    custom_id, _ = await lines.open_line(raw, batch.endpoint)
                    text.append(lines.unsent_line(batch.id, number, custom_id, "batch_expired", message))
            await self.files.append(work.errors, text)
            for number, _ in found:
                work.done[number] = 1
            work.failed += len(text)
            if self.is_paused:
                return
        await self._finish(work, "expired")

    async def _cancel_jobs(self, work: Work) -> None:
        """Cancel the jobs of the batch's lines. Raises NotSavedError."""
        work.is_stopping = True
        for job_id in [*work.in_flight.values()]:
            if (job := self.jobs.get(job_id)) is not None:
                await self.jobs.cancel(job)

    async def _finish(self, work: Work, state: Ending, problems: Sequence[Problem] = ()) -> None:
        """Write the end of the batch to the store, with its files. Raises NotSavedError."""
        await self._cancel_jobs(work)
        batch = work.batch
        if state != "failed":  # else the file is validated again
            work.ending = state
        if state == "completed":
            batch.finalizing_at = round(time.time(), 3)
        files = [file for file in (work.output, work.errors) if file.bytes]
        ended_at = round(time.time(), 3)
        rows: dict[Entry, JsonValue] = {}
        for file in files:
            file.created_at = ended_at
            await self.files.append(file, [])  # cuts off a line that a kill left incomplete
            rows |= self.files.row(file)
        await self.jobs.change(
            batch,
            rows,
            state=state,
            ended_at=ended_at,
            completed=work.completed,
            failed=work.failed,
            has_output=work.output in files,
            has_errors=work.errors in files,
            problems=[*problems],
        )
        for file in files:
            self.files.publish(file)
        del self._work[batch.id]
        for file in (work.output, work.errors):
            self.files.drop(file)  # if it is empty
        log.info(
            "batch.ended",
            batch=batch.id,
            state=batch.state,
            endpoint=batch.endpoint,
            completed=batch.completed,
            failed=batch.failed,
        )

    async def expire(self) -> None:
        """Delete expired batches and files."""
        await self.jobs.expire(Batch)
        await self._expire_files()

    async def _expire_files(self) -> None:
        expiry, now = self.expiry_of(self.files.listing(None, is_admin=True)), time.time()
        try:
            await self.files.remove([name for name, until in expiry.items() if until is not None and until <= now])
        except NotSavedError as error:
            log.warning("batch.not_kept", reason=error.message)


def _new_work(batch: Batch) -> Work:
    """The work on a batch whose output files were not read yet."""
    name = batch.id
    output = File(batch.output_file, batch.owner, f"{name}_output.jsonl", "batch_output", batch.created_at)
    return Work(batch, output, replace(output, id=batch.error_file, filename=f"{name}_error.jsonl"))
