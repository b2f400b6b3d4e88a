"""A batch's way: what is done is done once, whatever is cut short, refused by the disk, or cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.catalog.sections.sections import JobsConfig
from supervisor.errors import NotFoundError
from supervisor.host.store.request_buffer import BodyBudget, Bytes
from supervisor.host.store.store import NotSavedError, Store
from supervisor.jobs import batches as module
from supervisor.jobs.batches import Batches
from supervisor.jobs.files import File, Files
from supervisor.jobs.inference import Answer, InferenceJobs, JobFullError
from supervisor.jobs.job import Batch, Inference, Line
from supervisor.jobs.jobs import Jobs, Progress

CHAT = "/v1/chat/completions"


class Worker:
    """Answers each request with its own body, once it is `open`, unless it holds those of this name."""

    def __init__(self, batches: Batches) -> None:
        self.sent: list[str] = []
        self.jobs: list[Line] = []
        self.open = asyncio.Event()
        self.open.set()
        self._batches = batches

    async def __call__(self, job: Inference, body: bytes) -> Answer:
        assert isinstance(job, Line)
        if await self._batches.is_done(job):
            return Answer(200, "", b"")
        self.sent.append(job.custom_id)
        self.jobs.append(job)
        await self.open.wait()
        return Answer(200, "application/json", body)


async def check(_endpoint: str, body: Bytes) -> tuple[str | None, Bytes]:
    if b"nobody" in body:
        raise NotFoundError("There is no model nobody.", code="model_not_found")
    return "m", body


@asynccontextmanager
async def opened(folder: Path, **limits: float) -> AsyncIterator[tuple[Batches, Worker]]:
    store = await Store.open(folder / "state.sqlite3")
    jobs = Jobs()
    inference = InferenceJobs(jobs, Files(), config=JobsConfig(**limits))
    batches = Batches(inference, BodyBudget())
    worker = Worker(batches)
    jobs.open(store)
    inference.open(folder)
    batches.open(store, folder)
    batches.start(check)
    inference.start(worker)
    try:
        yield batches, worker
    finally:
        await batches.close()
        await inference.close()
        await store.close()


async def begin(batches: Batches, *names: str, model: str = "m", window_s: float = 3600) -> Batch:
    lines = (
        json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": model, "name": name}})
        for name in names
    )
    files = batches.files
    file = files.begin(None, "batch")
    await files.append(file, ["\n".join(lines).encode()])
    await files.keep(file)
    return await batches.add(CHAT, file, None, window="1h", window_s=window_s, headers={}, metadata=None)


async def until(said: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not said():
            await asyncio.sleep(0.005)


def answers(folder: Path, file_id: str) -> list[dict[str, Any]]:
    path = folder / "files" / file_id
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def names(folder: Path, batch: Batch) -> list[str]:
    return sorted(each["custom_id"] for each in answers(folder, batch.output_file))


class TestAnswering:
    async def test_each_line_once(self, tmp_path):
        async with opened(tmp_path) as (batches, worker):
            batch = await begin(batches, *"abcdefghijklmnop")
            await until(lambda: batch.is_over)
            assert sorted(worker.sent) == [*"abcdefghijklmnop"]
            assert (batch.state, batch.total, batch.completed, batch.failed) == ("completed", 16, 16, 0)
            assert names(tmp_path, batch) == [*"abcdefghijklmnop"]
            assert {job.headers["x-priority"] for job in worker.jobs} == {"100"}
            assert not batches.jobs.of(Line)

    async def test_so_many_are_jobs_at_once(self, tmp_path):
        async with opened(tmp_path, jobs_running=3) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, *"abcdefghijklmnop")
            await until(lambda: len(worker.sent) == 2)
            await until(lambda: len(batches.jobs.of(Line)) == 6)
            assert batches.jobs.kinds[Batch].progress(batch) == Progress(0.0)
            assert len(worker.sent) == 2, "the last place is for other jobs"
            worker.open.set()
            await until(lambda: batch.is_over)

    async def test_a_model_that_went_meanwhile_fails_its_lines(self, tmp_path, monkeypatch):
        async with opened(tmp_path) as (batches, worker):
            batch = await begin(batches, "a", model="nobody")
            await until(lambda: batch.is_over)
            assert [each.code for each in batch.problems] == ["model_not_found"]
            monkeypatch.setattr(Batches, "_check_line", lambda *_: asyncio.sleep(0))
            batch = await begin(batches, "a", model="nobody")
            await until(lambda: batch.is_over)
            assert (batch.state, batch.failed, worker.sent) == ("completed", 1, [])
            [error] = answers(tmp_path, batch.error_file)
            assert error["response"]["body"]["error"]["code"] == "model_not_found"

    async def test_an_answer_for_which_there_is_no_room(self, tmp_path, monkeypatch):
        async with opened(tmp_path) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, "a")
            await until(lambda: worker.sent)

            def full(_size: int) -> None:
                raise JobFullError("The disk is full.")

            monkeypatch.setattr(InferenceJobs, "make_room", lambda _self, size: full(size))
            worker.open.set()
            await until(lambda: batch.is_over)
            [error] = answers(tmp_path, batch.error_file)
            assert error["response"]["body"]["error"]["code"] == "job_not_kept"


class TestRestart:
    async def test_what_is_done_is_not_sent_again(self, tmp_path):
        async with opened(tmp_path, jobs_running=4) as (batches, worker):
            batch = await begin(batches, *"abcdefgh")
            await until(lambda: batches._work[batch.id].completed >= 1)
            assert batches.jobs.kinds[Batch].progress(batch).share >= 1 / 8
            worker.open.clear()
        done = set(names(tmp_path, batch))
        async with opened(tmp_path, jobs_running=4) as (batches, worker):
            batch = batches.jobs.find(Batch, batch.id, None, is_admin=False)
            await until(lambda: batch.is_over)
            assert {*worker.sent} == {*"abcdefgh"} - done
            assert names(tmp_path, batch) == [*"abcdefgh"]

    async def test_an_answer_that_a_kill_cut_short_comes_again(self, tmp_path):
        """As it stands on disk: two answers, half a third one, and jobs that were not forgotten."""
        async with opened(tmp_path, jobs_running=9) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, *"abc")
            await until(lambda: len(worker.sent) == 3)
            name = batch.id.removeprefix("batch_")
        whole = "".join(f'{{"id":"batch_req_{name}_{at}","custom_id":"{each}"}}\n' for at, each in ((1, "a"), (3, "c")))
        (tmp_path / "files" / batch.output_file).write_text(whole + f'{{"id":"batch_req_{name}_2","cus')
        async with opened(tmp_path) as (batches, worker):
            batch = batches.jobs.find(Batch, batch.id, None, is_admin=False)
            await until(lambda: batch.is_over)
            assert worker.sent == ["b"]
            assert (names(tmp_path, batch), batch.completed) == ([*"abc"], 3)
            assert not batches.jobs.of(Line)

    async def test_one_that_was_cancelled_stays_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Batches, "_run", lambda *_: asyncio.sleep(0))
        async with opened(tmp_path) as (batches, _worker):
            batch = await begin(batches, "a")
            await batches.cancel(batch)
            assert batch.api_state == "cancelling"
        monkeypatch.undo()
        async with opened(tmp_path) as (batches, worker):
            batch = batches.jobs.find(Batch, batch.id, None, is_admin=False)
            await until(lambda: batch.is_over)
            assert (batch.state, worker.sent) == ("cancelled", [])

    async def test_paused_and_gone_on(self, tmp_path):
        """A hand-over that failed."""
        async with opened(tmp_path) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, *"abc")
            await until(lambda: len(worker.sent) == 3)
            await batches.close()
            await batches.inference.close()
            worker.open.set()
            batches.go_on()
            batches.inference.go_on()
            await until(lambda: batch.is_over)
            assert names(tmp_path, batch) == [*"abc"]


class TestDisk:
    """What can't be written isn't over."""

    async def test_an_answer_that_cannot_be_written_is_fetched_again(self, tmp_path, monkeypatch):
        monkeypatch.setattr("supervisor.jobs.inference.LONGEST_PAUSE_S", 0.01)
        async with opened(tmp_path) as (batches, worker):
            files, refusals = batches.files, [NotSavedError("The disk is full.")] * 2
            append = files.append

            async def refusing(file: File, pieces: list[Bytes], **keys: bool) -> None:
                if file.purpose == "batch_output" and refusals:
                    raise refusals.pop()
                await append(file, pieces, **keys)

            monkeypatch.setattr(type(files), "append", lambda _self, *args, **keys: refusing(*args, **keys))
            batch = await begin(batches, "a")
            await until(lambda: batch.is_over)
            assert (names(tmp_path, batch), worker.sent) == (["a"], ["a"] * 3)

    async def test_an_end_that_cannot_be_written_is_none(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
        async with opened(tmp_path) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, "a")
            await until(lambda: worker.sent)
            store = batches.jobs._store
            assert store is not None
            transaction, states = store.transaction, []

            def refusing():
                states.append(batch.state)
                if len(states) < 3:
                    raise NotSavedError("The disk is full.")
                return transaction()

            monkeypatch.setattr(store, "transaction", refusing)
            worker.open.set()
            await until(lambda: batch.is_over)
            assert "completed" not in states
            assert (batch.state, batch.completed) == ("completed", 1)


class TestLostFile:
    async def test_its_batch_fails_and_keeps_what_it_has(self, tmp_path):
        async with opened(tmp_path, jobs_running=4) as (batches, worker):
            batch = await begin(batches, *"abcdefgh")
            await until(lambda: batches._work[batch.id].completed >= 1)
            worker.open.clear()
        done = names(tmp_path, batch)
        (tmp_path / "files" / batch.input_file).unlink()
        async with opened(tmp_path) as (batches, worker):
            batch = batches.jobs.find(Batch, batch.id, None, is_admin=False)
            await until(lambda: batch.is_over)
            assert (batch.state, [each.code for each in batch.problems]) == ("failed", ["file_not_found"])
            kept = names(tmp_path, batch)
            assert (batch.completed, {*kept} >= {*done}, batch.has_errors) == (len(kept), True, False)
            assert not batches.jobs.of(Line)


class TestCancelling:
    async def test_while_its_file_is_read(self, tmp_path):
        async with opened(tmp_path) as (batches, worker):
            read = asyncio.Event()

            async def slowly(endpoint: str, body: Bytes) -> tuple[str | None, Bytes]:
                await read.wait()
                return await check(endpoint, body)

            batches._check = slowly
            batch = await begin(batches, *"abc")
            await batches.cancel(batch)
            read.set()
            await until(lambda: batch.is_over)
            assert (batch.state, worker.sent) == ("cancelled", [])

    async def test_twice(self, tmp_path):
        async with opened(tmp_path) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, *"abc")
            await until(lambda: len(worker.sent) == 3)
            await asyncio.gather(batches.cancel(batch), batches.cancel(batch))
            await until(lambda: batch.is_over)
            await batches.cancel(batch)
            assert (batch.state, batch.has_output, batches.jobs.of(Line)) == ("cancelled", False, [])
            assert {path.name for path in (tmp_path / "files").iterdir()} == {batch.input_file}


class TestExpiry:
    async def test_while_the_daemon_was_off(self, tmp_path, monkeypatch):
        async with opened(tmp_path) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, *"abc")
            await until(lambda: len(worker.sent) == 3)
        now = module.time.time()
        monkeypatch.setattr(module.time, "time", lambda: now + 7200)
        async with opened(tmp_path) as (batches, worker):
            worker.open.clear()
            batch = batches.jobs.find(Batch, batch.id, None, is_admin=False)
            await until(lambda: batch.is_over)
            assert (batch.state, batch.failed) == ("expired", 3)
            assert {each["error"]["code"] for each in answers(tmp_path, batch.error_file)} == {"batch_expired"}
            assert not batches.jobs.of(Line)

    async def test_a_file_goes_after_the_last_batch_that_read_it(self, tmp_path, monkeypatch):
        async with opened(tmp_path, jobs_keep_s=100) as (batches, worker):
            worker.open.clear()
            batch = await begin(batches, "a")
            file = batches.files.find(batch.input_file, None, is_admin=False)
            now = module.time.time()
            with monkeypatch.context() as patched:
                patched.setattr(module.time, "time", lambda: now + 1000)
                await batches.expire()
                assert batches.expiry_of([file]) == {file.id: None}
                worker.open.set()
                await until(lambda: batch.is_over)
                assert batches.expiry_of([file]) == {file.id: pytest.approx(now + 1100, abs=1)}
                patched.setattr(module.time, "time", lambda: now + 1200)
                await batches.expire()
            assert batches.jobs.listing(Batch, None, is_admin=True) == batches.files.listing(None, is_admin=True) == []
            assert not list((tmp_path / "files").iterdir())
