"""Batches: files of requests, each line of which is a job (`daemon.jobs`), with the least urgent priority unless they say otherwise.

A batch's file is checked first, line by line; one mistake refuses all of it. Then its lines become jobs, so many at a time that
the places are used, and what comes of each is appended to the batch's output, or to its errors. A line is done when that is on
disk, and its job goes after that: so after a restart the two files tell which lines are done, and only the others are sent. At
the end, the batch and its two files are written down in one step.

A batch ends when all lines are done, when it is cancelled, or when its window is over. Batches that are over go after
`jobs_keep_s`, and so do files, which stay as long as a batch that isn't over reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from supervisor.core.demand import LEAST_URGENT
from supervisor.daemon import batch as lines
from supervisor.daemon.batch import Batch, Lines, Problem
from supervisor.daemon.files import MOST, File, new_id
from supervisor.daemon.job import Answer, Job, JobFullError, Line
from supervisor.daemon.jobs import LONGEST_PAUSE_S, SWEEP_S, Jobs
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError, TooLargeError, UnavailableError
from supervisor.io.request_buffer import BodyBudget, Bytes, RequestBuffer
from supervisor.io.store import NotSavedError, Store

LOOK_S: Final = 1.0
MOST_PROBLEMS: Final = 100
"""So many mistakes of a file are told."""
_COLLECTION: Final = "batches"
_PRIORITY: Final = "x-priority"

Ending = Literal["completed", "failed", "expired", "cancelled"]
Check = Callable[[str, Bytes], Awaitable[tuple[str | None, Bytes]]]
"""The model and the body of a request for this endpoint that is to be sent as a job. Raises LlmuxError."""

log = structlog.get_logger("llmux.jobs")


@dataclass(slots=True)
class Progress:
    """Of a batch that isn't over."""

    output: File
    errors: File
    done: bytearray = field(default_factory=bytearray)  # by the lines' numbers; empty until its file is checked
    in_flight: dict[int, str] = field(default_factory=dict)  # jobs by their lines; empty: it is being added
    completed: int = 0
    failed: int = 0
    is_stopping: bool = False  # what is in flight is cancelled, which nobody is told
    ending: Ending | None = None  # set iff only the last step is missing
    is_known: asyncio.Event = field(default_factory=asyncio.Event)  # the files were searched for what is done

    def is_done(self, number: int) -> bool:
        """Is this line's end on disk?"""
        return number < len(self.done) and self.done[number] != 0


@dataclass(slots=True)
class Batches:
    """One for each daemon. Use from the event loop's thread."""

    jobs: Jobs
    bodies: BodyBudget
    line_limit: int = 32 << 20  # bytes
    _store: Store | None = None
    _check: Check | None = None
    _all: dict[str, Batch] = field(default_factory=dict)  # oldest first
    _progress: dict[str, Progress] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _sweeping: asyncio.Task[None] | None = None
    is_paused: bool = True

    def __post_init__(self) -> None:
        self.jobs.on_end.append(self._ended)

    # -------------------------------------------------------------------------------------------------- begin and end

    def open(self, store: Store, folder: Path, owners: Mapping[str, str] | None = None) -> None:
        """Go on with the batches and files that are kept. Blocks on a folder. `owners`: see `former_owners`."""

        def owner(kept: str | None) -> str | None:
            return (owners or {}).get(kept or "", kept)

        self._store = store
        found = []
        for name, row in store.items(_COLLECTION).items():
            try:
                found.append(msgspec.convert(row, Batch))
            except msgspec.ValidationError as error:
                log.warning("batch.unreadable", batch=name, reason=str(error))
        for batch in sorted(found, key=lambda batch: (batch.created_at, batch.id)):
            batch.owner = owner(batch.owner)
            self._all[batch.id] = batch
            if not batch.is_over:
                self._progress[batch.id] = _progress(batch)
        growing = [file for progress in self._progress.values() for file in (progress.output, progress.errors)]
        self.jobs.files.open(store, folder, owner, growing)

    def start(self, check: Check) -> None:
        """Send the lines of those that aren't over, now and later. Before the jobs start."""
        self._check = check
        self.go_on()

    def go_on(self) -> None:
        """Begin or go on, also after `close`."""
        self.is_paused = False
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="batches")
        for job in self.jobs.lines():
            if job.line is not None and (progress := self._progress.get(job.line.batch)) is not None:
                progress.in_flight[job.line.number] = job.id
        for name in self._progress:
            self._begin(self._all[name])

    async def close(self) -> None:
        """Send no further line; close the jobs after that. Those that are in flight are answered or sent again, as jobs are."""
        self.is_paused = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self.jobs.tell()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _begin(self, batch: Batch) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch), name=batch.id)
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    # ------------------------------------------------------------------------------------------------------- for clients

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
        """A new batch of this file. Raises JobFullError, UnavailableError, and NotSavedError."""
        if self.jobs.folder is None or self.jobs.files.folder is None or self.is_paused:
            raise UnavailableError("Batches can't be kept now; the log says why.", retry_after_s=LOOK_S)
        if len(self._progress) >= self.jobs.config.jobs_waiting:
            message = f"{len(self._progress)} batches aren't over yet (limits.jobs_waiting)."
            raise JobFullError(message, retry_after_s=LONGEST_PAUSE_S)
        if len(self._all) >= MOST:
            raise JobFullError(f"{MOST} batches are kept already (limits.jobs_keep_s).", retry_after_s=LONGEST_PAUSE_S)
        now = round(time.time(), 3)
        headers = {_PRIORITY: str(LEAST_URGENT)} | headers
        ids = (f"batch_{secrets.token_hex(12)}", owner, endpoint, file.id, new_id(), new_id())
        batch = Batch(*ids, window, now, now + window_s, headers, metadata)
        self._all[batch.id] = batch  # at once: its file stays
        try:
            await self._save(batch)
        except BaseException:
            del self._all[batch.id]
            raise
        progress = self._progress[batch.id] = _progress(batch)
        for each in (progress.output, progress.errors):
            self.jobs.files.grow(each)
        self._begin(batch)
        return batch

    def find(self, batch_id: str, owner: str | None, *, is_admin: bool) -> Batch:
        """The batch, for whom it is or for an admin. Raises NotFoundError."""
        batch = self._all.get(batch_id)
        if batch is None or not (is_admin or batch.owner == owner):
            raise NotFoundError(f"There is no batch {batch_id[:100]!r}, or no longer.", code="batch_not_found")
        return batch

    def listing(self, owner: str | None, *, is_admin: bool) -> list[Batch]:
        """The batches of this owner, newest first; an admin sees all."""
        return [batch for batch in reversed(self._all.values()) if is_admin or batch.owner == owner]

    async def counts(self, batch: Batch) -> tuple[int, int]:
        """How many requests were answered, and how many failed."""
        progress = self._progress.get(batch.id)
        if progress is None or batch.started_at is None:
            return batch.completed, batch.failed
        with contextlib.suppress(TimeoutError):  # after a restart its files must be searched
            async with asyncio.timeout(LOOK_S):
                await progress.is_known.wait()
        return progress.completed, progress.failed

    async def cancel(self, batch: Batch) -> None:
        """End it soon: what is answered stays, and nothing more is sent. Raises InvalidRequestError, and NotSavedError."""
        if batch.state in {"cancelling", "cancelled"}:
            return
        if batch.is_over or batch.state == "finalizing":
            message = f"{batch.id} is {batch.state}: it can't be cancelled any more."
            raise InvalidRequestError(message, code="batch_ended")
        now = round(time.time(), 3)
        await self._save(replace(batch, state="cancelling", cancelling_at=now))
        if batch.id not in self._progress:  # it is over since just now
            await self._save(batch)
            return
        batch.state, batch.cancelling_at = "cancelling", now
        self.jobs.tell()

    async def remove_file(self, file: File) -> None:
        """Forget a file. Raises InvalidRequestError while a batch reads it, and NotSavedError."""
        if (reader := self._reader(file.id)) is not None:
            message = f"{reader.id} reads this file: cancel it, or wait for its end."
            raise InvalidRequestError(message, code="file_in_use")
        await self.jobs.files.remove([file.id])

    def _reader(self, file_id: str) -> Batch | None:
        """The batch that isn't over and needs this file."""
        return next((batch for batch in self._all.values() if batch.input_file == file_id and not batch.is_over), None)

    def expiry_of(self, files: Iterable[File]) -> dict[str, float | None]:
        """When each is forgotten, by its id; None: a batch still reads it."""
        used: dict[str, float] = {}
        for batch in self._all.values():
            ended_at = math.inf if batch.ended_at is None else batch.ended_at
            used[batch.input_file] = max(ended_at, used.get(batch.input_file, 0.0))
        last = {file.id: max(file.created_at, used.get(file.id, 0.0)) for file in files}
        keep_s = self.jobs.config.jobs_keep_s
        return {name: None if at == math.inf else at + keep_s for name, at in last.items()}

    async def is_done(self, line: Line) -> bool:
        """Is a line's end on disk? Then its job has nothing left to do: the daemon died before it forgot that."""
        progress = self._progress.get(line.batch)
        if progress is None:
            return True
        await progress.is_known.wait()
        return progress.is_done(line.number)

    # ----------------------------------------------------------------------------------------------------- a batch's way

    async def _run(self, batch: Batch) -> None:
        progress = self._progress[batch.id]
        while not self.is_paused and not batch.is_over:
            try:
                await self._go_through(batch, progress)
            except NotSavedError as error:
                log.warning("batch.not_kept", batch=batch.id, reason=error.message, consequence="it is tried again")
                await self._rest(batch)
            except Exception as error:
                log.exception("batch.broke", batch=batch.id, reason=str(error))
                await self._rest(batch)

    async def _rest(self, batch: Batch) -> None:
        until = time.monotonic() + LONGEST_PAUSE_S
        while not self.is_paused and batch.state != "cancelling" and time.monotonic() < until:
            await self.jobs.changed(LOOK_S)

    async def _go_through(self, batch: Batch, progress: Progress) -> None:
        """From where it stands to its end, or until it is paused. Raises NotSavedError."""
        if not progress.is_known.is_set():
            await self._look_back(batch, progress)
        ending = "cancelled" if batch.state == "cancelling" else progress.ending
        if ending is not None:
            await self._end(batch, progress, ending)
            return
        try:
            file = await self.jobs.files.open_file(batch.input_file)
        except NotFoundError as error:
            await self._end(batch, progress, "failed", [Problem("file_not_found", error.message)])
            return
        with file:
            if batch.state == "validating":
                await self._validate(batch, progress, Lines(file, self.line_limit))
            if batch.state == "in_progress":
                file.seek(0)
                await self._feed(batch, progress, Lines(file, self.line_limit))
            if self.is_paused or batch.is_over:
                return
            if batch.state == "cancelling":
                await self._end(batch, progress, "cancelled")
            elif progress.completed + progress.failed < batch.total or batch.started_at is None:
                file.seek(0)
                await self._expire(batch, progress, Lines(file, self.line_limit))
            else:
                await self._end(batch, progress, "completed")

    def _stops(self, batch: Batch) -> bool:
        return self.is_paused or batch.state == "cancelling" or time.time() >= batch.expires_at

    async def _look_back(self, batch: Batch, progress: Progress) -> None:
        """Find out what is done, after a restart. Raises NotSavedError."""

        async def done(file: File) -> list[int]:
            if not file.bytes:
                return []
            try:
                with await self.jobs.files.open_file(file.id) as content:
                    numbers, file.bytes = await asyncio.to_thread(lines.done_in, content)
            except (OSError, NotFoundError) as error:
                raise NotSavedError(f"What is done of {batch.id} can't be read: {error}") from error
            return numbers

        completed, failed = await done(progress.output), await done(progress.errors)
        progress.completed, progress.failed = len(completed), len(failed)
        progress.done = bytearray(batch.last_line + 1)
        for number in (*completed, *failed):
            if number <= batch.last_line:
                progress.done[number] = 1
        progress.is_known.set()

    async def _validate(self, batch: Batch, progress: Progress, reading: Lines) -> None:
        """Read all of its lines once. Raises NotSavedError."""
        problems: list[Problem] = []
        seen: set[bytes] = set()
        total = last = 0
        while not (self._stops(batch) or reading.is_over):
            for number, raw in await self._next(reading):
                last, total = number, total + 1
                if total > self.jobs.config.batch_lines:
                    message = f"The file has more than {self.jobs.config.batch_lines} requests (limits.batch_lines)."
                    await self._end(batch, progress, "failed", [Problem("too_many_requests", message, None, number)])
                    return
                try:
                    await self._look_at(batch, raw, seen)
                except LlmuxError as error:
                    problems.append(Problem(error.code, error.message, error.param, number))
                if len(problems) >= MOST_PROBLEMS:
                    await self._end(batch, progress, "failed", problems)
                    return
                await asyncio.sleep(0)
        if self._stops(batch):
            return
        if problems or not total:
            problems = problems or [Problem("empty_file", "The file has no requests.")]
            await self._end(batch, progress, "failed", problems)
            return
        begun = replace(batch, state="in_progress", started_at=round(time.time(), 3), total=total, last_line=last)
        await self._save(begun)
        progress.done = bytearray(last + 1)
        batch.started_at, batch.total, batch.last_line = begun.started_at, total, last
        if batch.state == "validating":
            batch.state = "in_progress"
        else:  # it was cancelled meanwhile
            await self._save(batch)

    async def _next(
        self, reading: Lines, is_wanted: Callable[[int], bool] = lambda _: True, most: int = lines.PIECE
    ) -> list[tuple[int, bytes | None]]:
        """See `Lines.some`. Raises NotSavedError."""
        try:
            return await reading.some(is_wanted, most)
        except OSError as error:
            raise NotSavedError(f"The file of a batch can't be read: {error.strerror or error}") from error

    async def _look_at(self, batch: Batch, raw: bytes | None, seen: set[bytes]) -> None:
        """Raises LlmuxError for a line that can't be sent."""
        held = RequestBuffer(self.bodies, raw or b"")
        held.keep(raw or b"")
        try:
            custom_id, body = await lines.open_line(raw, batch.endpoint)
            if (digest := lines.digest_of(custom_id)) in seen:
                message = f"custom_id {custom_id[:100]!r} is that of an earlier line."
                raise InvalidRequestError(message, code="duplicate_custom_id", param="custom_id")
            seen.add(digest)
            assert self._check is not None
            await self._check(batch.endpoint, body)
        finally:
            held.release()

    async def _feed(self, batch: Batch, progress: Progress, reading: Lines) -> None:
        """Make its lines jobs, and wait until they are done. Raises NotSavedError."""

        def is_wanted(number: int) -> bool:
            return not progress.is_done(number) and number not in progress.in_flight

        while not self._stops(batch):
            if self._in_flight()[batch.owner] >= 2 * self.jobs.config.jobs_running:
                await self.jobs.changed(LOOK_S)
                continue
            for number, raw in await self._next(reading, is_wanted, 1):
                await self._send(batch, progress, number, raw)
            if reading.is_over:
                break
        while progress.in_flight and not self._stops(batch):
            await self.jobs.changed(LOOK_S)

    def _in_flight(self) -> Counter[str | None]:
        """Lines that are jobs now, by key."""
        found: Counter[str | None] = Counter()
        for name, progress in self._progress.items():
            found[self._all[name].owner] += len(progress.in_flight)
        return found

    async def _send(self, batch: Batch, progress: Progress, number: int, raw: bytes | None) -> None:
        """Make a line a job, as soon as there is room for it. Raises NotSavedError."""
        held = RequestBuffer(self.bodies)
        held.keep(raw or b"")
        progress.in_flight[number] = ""
        custom_id = ""
        try:
            custom_id, body = await lines.open_line(raw, batch.endpoint)
            assert self._check is not None
            model, body = await self._check(batch.endpoint, body)
            line = Line(batch.id, number, custom_id)
            while not self._stops(batch):
                try:
                    job = await self.jobs.add(batch.endpoint, model, batch.headers, body, batch.owner, line=line)
                except JobFullError:
                    await self.jobs.changed(LOOK_S)
                else:
                    progress.in_flight[number] = job.id
                    return
        except NotSavedError:
            raise
        except LlmuxError as error:  # the configuration is another one since its file was checked, or so is a limit
            found = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
            await self._note(
                batch, progress, number, [lines.refused(batch.id, number, custom_id, int(error.status), "", found)]
            )
        finally:
            held.release()
            if not progress.in_flight.get(number, True):
                del progress.in_flight[number]

    async def _ended(self, job: Job, answer: Answer | None) -> None:
        """Keep what came of a line, and return when that is on disk; see `Jobs.on_end`. Raises NotSavedError."""
        line = job.line
        progress = None if line is None else self._progress.get(line.batch)
        if line is None or progress is None:
            return
        batch = self._all[line.batch]
        await progress.is_known.wait()
        if not progress.is_done(line.number):
            about = (batch.id, line.number, line.custom_id)
            if answer is None:
                if not progress.is_stopping:
                    why = lines.unsent(*about, "request_cancelled", "The job of this request was cancelled.")
                    await self._note(batch, progress, line.number, [why])
            elif answer.error is not None:
                error = lines.refused(*about, answer.status, job.request_id, answer.error)
                await self._note(batch, progress, line.number, [error])
            else:
                await self._keep(batch, progress, job, line, answer)
        progress.in_flight.pop(line.number, None)

    async def _keep(self, batch: Batch, progress: Progress, job: Job, line: Line, answer: Answer) -> None:
        about = (batch.id, line.number, line.custom_id)
        try:
            self.jobs.make_room(len(answer.body))
            text = await asyncio.to_thread(lines.answered, *about, answer.status, job.request_id, answer.body)
        except (JobFullError, TooLargeError) as refused:
            why = {"message": f"Its result can't be kept: {refused.message}", "code": "job_not_kept"}
        except ValueError as error:
            why = {"message": f"The answer is not valid JSON: {error}.", "code": "upstream_error"}
        else:
            await self._note(batch, progress, line.number, text, is_answer=True)
            return
        failed = lines.refused(*about, 500, job.request_id, why)
        await self._note(batch, progress, line.number, [failed])

    async def _note(
        self, batch: Batch, progress: Progress, number: int, text: list[Bytes], *, is_answer: bool = False
    ) -> None:
        """A line is done, with this. Raises NotSavedError."""
        file = progress.output if is_answer else progress.errors
        await self.jobs.files.append(file, text)
        progress.done[number] = 1
        if is_answer:
            progress.completed += 1
        else:
            progress.failed += 1

    # ---------------------------------------------------------------------------------------------------------- its end

    async def _expire(self, batch: Batch, progress: Progress, reading: Lines) -> None:
        """Say of each line that isn't done that it won't be. Raises NotSavedError."""
        await self._stop(progress)
        message = "This request could not be executed before the completion window expired."
        while batch.started_at is not None and not reading.is_over:
            found = await self._next(reading, lambda number: not progress.is_done(number))
            text: list[Bytes] = []
            for number, raw in found:
                with contextlib.suppress(LlmuxError):
                    custom_id, _ = await lines.open_line(raw, batch.endpoint)
                    text.append(lines.unsent(batch.id, number, custom_id, "batch_expired", message))
            await self.jobs.files.append(progress.errors, text)
            for number, _ in found:
                progress.done[number] = 1
            progress.failed += len(text)
            if self.is_paused:
                return
        await self._end(batch, progress, "expired")

    async def _stop(self, progress: Progress) -> None:
        """Cancel the jobs of its lines. Raises NotSavedError."""
        progress.is_stopping = True
        left = {job.id: job for job in self.jobs.lines()}
        for job_id in [*progress.in_flight.values()]:
            if (job := left.get(job_id)) is not None:
                await self.jobs.cancel(job)

    async def _end(self, batch: Batch, progress: Progress, state: Ending, problems: Sequence[Problem] = ()) -> None:
        """Write down that it is over, with its files. Raises NotSavedError."""
        await self._stop(progress)
        if state != "failed":  # else its file is checked again
            progress.ending = state
        if state == "completed":
            batch.state, batch.finalizing_at = "finalizing", round(time.time(), 3)
        files = [file for file in (progress.output, progress.errors) if file.bytes]
        over = replace(
            batch,
            state=state,
            ended_at=round(time.time(), 3),
            completed=progress.completed,
            failed=progress.failed,
            has_output=progress.output in files,
            has_errors=progress.errors in files,
            problems=[*problems],
        )
        for file in files:
            file.created_at = over.ended_at or 0.0
            await self.jobs.files.append(file, [])  # without what a kill cut short
        assert self._store is not None
        async with self._store.transaction() as changes:
            changes[_COLLECTION, batch.id] = msgspec.to_builtins(over)
            for file in files:
                changes.update(self.jobs.files.row(file))
        for file in files:
            self.jobs.files.kept(file)
        for each in fields(over):
            setattr(batch, each.name, getattr(over, each.name))
        self._is_over(batch)

    def _is_over(self, batch: Batch) -> None:
        progress = self._progress.pop(batch.id)
        for file in (progress.output, progress.errors):
            self.jobs.files.drop(file)  # an empty one
        log.info(
            "batch.ended",
            batch=batch.id,
            state=batch.state,
            endpoint=batch.endpoint,
            completed=batch.completed,
            failed=batch.failed,
        )

    async def _save(self, batch: Batch) -> None:
        assert self._store is not None
        await self._store.put(_COLLECTION, batch.id, msgspec.to_builtins(batch))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.expire()

    async def expire(self) -> None:
        """Forget batches and files that have been kept long enough."""
        now = time.time()
        before = now - self.jobs.config.jobs_keep_s
        old = [batch.id for batch in self._all.values() if batch.ended_at is not None and batch.ended_at <= before]
        files = self.jobs.files
        expiry = self.expiry_of(files.listing(None, is_admin=True))
        gone = [name for name, until in expiry.items() if until is not None and until <= now]
        try:
            await files.remove(gone)
            if old:
                assert self._store is not None
                async with self._store.transaction() as changes:
                    changes.update({(_COLLECTION, name): None for name in old})
        except NotSavedError as error:
            log.warning("batch.not_kept", reason=error.message)
            return
        for name in old:
            self._all.pop(name, None)


def _progress(batch: Batch) -> Progress:
    """With files that nobody has looked into."""
    name = batch.id
    output = File(batch.output_file, batch.owner, f"{name}_output.jsonl", "batch_output", batch.created_at)
    return Progress(output, replace(output, id=batch.error_file, filename=f"{name}_error.jsonl"))
