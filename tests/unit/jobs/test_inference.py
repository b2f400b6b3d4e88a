"""Jobs on their way, with a scripted sender: who gets a place, what stays on disk, and what an end cuts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from supervisor.catalog.keys import Key
from supervisor.catalog.sections.sections import JobsConfig
from supervisor.dialects.openai import OPENAI
from supervisor.errors import LlmuxError, TooLargeError, UnavailableError
from supervisor.gateway.request import Request
from supervisor.host.store.store import MIGRATIONS, NotSavedError, Store
from supervisor.jobs import inference as module
from supervisor.jobs import jobs as base
from supervisor.jobs.files import Files
from supervisor.jobs.inference import Answer, InferenceJobs, JobFullError
from supervisor.jobs.job import Inference, Job, Response, former_owners
from supervisor.jobs.jobs import Jobs, Progress
from supervisor.schema.request import Step

DONE = Answer(200, "application/json", b"{}")
FOR_RESPONSE = partial(Response, response="resp_1")
LATER = Answer(429, "", b"", {"message": "later"}, 0.01)


class Worker:
    """Answers each request when told to."""

    def __init__(self) -> None:
        self.sent: list[Inference] = []
        self.open = asyncio.Event()
        self.answers: list[Answer | Exception] = []

    async def __call__(self, job: Inference, _body: bytes) -> Answer:
        self.sent.append(job)
        answer = self.answers.pop(0) if self.answers else None
        if answer is None:
            await self.open.wait()
            answer = DONE
        if isinstance(answer, Exception):
            raise answer
        return answer


@asynccontextmanager
async def opened(folder: Path, worker: Worker | None = None, **limits: float) -> AsyncIterator[InferenceJobs]:
    store = await Store.open(folder / "state.sqlite3")
    jobs = InferenceJobs(Jobs(), Files(), config=JobsConfig(**limits))
    jobs.jobs.open(store)
    jobs.open(folder)
    jobs.jobs.start()
    if worker is not None:
        jobs.start(worker)
    try:
        yield jobs
    finally:
        await jobs.close()
        jobs.jobs.stop()
        await store.close()


async def add(jobs: InferenceJobs, owner: str | None = None, body: bytes = b"{}") -> Inference:
    return await jobs.add("/v1/chat/completions", "m", {}, body, owner)


async def until(said: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not said():
            await asyncio.sleep(0.005)


def files(folder: Path) -> set[str]:
    return {path.suffix for path in (folder / "jobs").iterdir()}


class TestPlaces:
    """So many run at once; whoever has the fewest is next."""

    async def test_keys_take_turns(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path, jobs_running=1) as jobs:
            for owner in ("ann", "ann", "ann", "bob"):
                await add(jobs, owner)
            jobs.configure(JobsConfig(jobs_running=2))
            jobs.start(worker)
            await until(lambda: len(worker.sent) == 2)
            assert {job.owner for job in worker.sent} == {"ann", "bob"}  # not in order: both read their bodies at once

    async def test_one_that_is_refused_for_now_gives_its_place_back(self, tmp_path):
        worker = Worker()
        worker.answers = [Answer(429, "", b"", {"message": "later"}, 3600.0)]
        async with opened(tmp_path, worker, jobs_running=1) as jobs:
            first, second = await add(jobs), await add(jobs)
            await until(lambda: second.state == "running")
            assert (first.state, first.tries) == ("queued", 1)

    async def test_it_is_tried_again(self, tmp_path):
        worker = Worker()
        worker.answers = [LATER, LATER, DONE]
        async with opened(tmp_path, worker, jobs_running=1) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            assert (job.state, job.tries) == ("completed", 3)

    async def test_not_for_ever(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "TRIES", 3)
        worker = Worker()
        worker.answers = [LATER] * 5
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            assert (job.state, job.tries, job.error) == ("failed", 3, {"message": "later"})

    async def test_its_steps_are_its_progress(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.state == "running")
            progress = jobs.jobs.kinds[Inference].progress
            assert progress(job) == Progress()
            request = Request(b"req_1", 0.0, OPENAI)
            request.attempt.step = Step(3, 12)
            jobs.find_request = lambda _: request
            assert progress(job) == Progress(0.25)
            worker.open.set()
            await until(lambda: job.is_over)
            assert progress(job) == Progress(1.0)

    async def test_so_many_are_before_it(self, tmp_path):
        async with opened(tmp_path) as jobs:
            first, second, third = [await add(jobs) for _ in range(3)]
            assert [jobs.ahead(job) for job in (first, second, third)] == [0, 1, 2]
            await jobs.cancel(first)
            assert jobs.ahead(third) == 1


class TestCancelling:
    async def test_before_it_has_begun(self, tmp_path):
        """Its task is there, but had no turn yet: a task that is cancelled then never runs."""
        worker = Worker()
        async with opened(tmp_path, jobs_running=1) as jobs:
            first, second = await add(jobs), await add(jobs)
            jobs.start(worker)
            await jobs.cancel(first)
            assert first.state == "cancelled"
            assert not worker.sent
            await until(lambda: second.state == "running")

    async def test_many_at_once(self, tmp_path):
        async with opened(tmp_path, Worker(), jobs_running=3) as jobs:
            found = [await add(jobs) for _ in range(30)]
            await until(lambda: found[0].state == "running")
            await asyncio.gather(*(jobs.cancel(job) for job in found))
            assert {job.state for job in found} == {"cancelled"}
            assert not files(tmp_path)

    async def test_it_does_not_begin_while_that_is_written_down(self, tmp_path, monkeypatch):
        """Places that come free meanwhile are others'."""
        worker, saving, saved = Worker(), asyncio.Event(), asyncio.Event()
        save = Jobs.save

        async def slow(self, job):
            if job.state == "cancelled":
                saving.set()
                await saved.wait()
            await save(self, job)

        monkeypatch.setattr(Jobs, "save", slow)
        async with opened(tmp_path, worker, jobs_running=1) as jobs:
            running, waiting = await add(jobs), await add(jobs)
            await until(lambda: running.state == "running")
            cancelling = asyncio.create_task(jobs.cancel(waiting))
            await saving.wait()
            worker.open.set()
            jobs.configure(JobsConfig(jobs_running=3))
            third = await add(jobs)
            await until(lambda: third.is_over)
            saved.set()
            await cancelling
            assert waiting not in worker.sent
        async with opened(tmp_path) as jobs:
            assert jobs.jobs.find(Inference, waiting.id, None, is_admin=True).state == "cancelled"

    async def test_twice_at_once(self, tmp_path):
        ends = []

        async def keep(job: Inference, _answer: Answer | None) -> None:
            ends.append(job.state)
            await asyncio.sleep(0)

        async with opened(tmp_path) as jobs:
            jobs.on_end[Response] = keep
            job = await jobs.add("/v1/responses", "m", {}, b"{}", None, FOR_RESPONSE)
            await asyncio.gather(jobs.cancel(job), jobs.cancel(job), jobs.remove(job))
            assert len(ends) == 1
            assert not jobs.jobs._store.items("jobs")
            assert not files(tmp_path)

    async def test_what_has_its_answer_is_kept(self, tmp_path, monkeypatch):
        worker, writing = Worker(), asyncio.Event()
        write = InferenceJobs._write

        async def slow(self, job, kind, data):
            if kind == "result":
                writing.set()
                await asyncio.sleep(0)
            await write(self, job, kind, data)

        monkeypatch.setattr(InferenceJobs, "_write", slow)
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            worker.open.set()
            await writing.wait()
            await jobs.cancel(job)
            assert job.state == "completed"
            with await jobs.result(job) as file:
                assert file.read() == DONE.body

    async def test_who_stops_waiting_for_it_ends_nothing_else(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.state == "running")
            asking = asyncio.create_task(jobs.cancel(job))
            await asyncio.sleep(0)
            asking.cancel()
            await until(lambda: job.is_over)
            assert job.state == "cancelled"


class TestBounds:
    async def test_all_that_come_at_once_are_counted(self, tmp_path):
        async with opened(tmp_path, jobs_running=1, jobs_waiting=2) as jobs:
            told = await asyncio.gather(*(add(jobs) for _ in range(20)), return_exceptions=True)
            assert sum(isinstance(each, Inference) for each in told) == 3
            assert sum(isinstance(each, JobFullError) for each in told) == 17

    async def test_their_bytes_as_well(self, tmp_path):
        async with opened(tmp_path, jobs_mib=1) as jobs:
            told = await asyncio.gather(*(add(jobs, body=b" " * 300_000) for _ in range(10)), return_exceptions=True)
            assert sum(isinstance(each, Inference) for each in told) == 3

    async def test_no_result_goes_for_what_has_no_room_even_so(self, tmp_path):
        worker = Worker()
        worker.answers = [Answer(200, "", b" " * 1000)]
        async with opened(tmp_path, worker, jobs_mib=1) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            with pytest.raises(TooLargeError):
                await add(jobs, body=b" " * (2 << 20))
            worker.open.clear()
            await add(jobs, body=b" " * 600_000)
            with pytest.raises(JobFullError):
                await add(jobs, body=b" " * 600_000)
            assert job.result_bytes == 1000
            (await jobs.result(job)).close()

    async def test_ended_ones_are_not_remembered_without_bound(self, tmp_path):
        worker = Worker()
        worker.open.set()
        async with opened(tmp_path, worker) as jobs:
            for _ in range(8):
                job = await add(jobs)
                await until(lambda job=job: job.is_over)
            jobs.jobs.kinds[Inference] = replace(jobs.jobs.kinds[Inference], most=3)
            await jobs.jobs.expire()
            found = jobs.jobs.listing(Inference, None, is_admin=True)
            assert len(found) == 3
            assert found[0] is job
            assert len(list((tmp_path / "jobs").iterdir())) == 3

    async def test_they_go_when_nobody_asks(self, tmp_path, monkeypatch):
        monkeypatch.setattr(base, "SWEEP_S", 0.01)
        worker = Worker()
        worker.open.set()
        async with opened(tmp_path, worker, jobs_keep_s=0.05) as jobs:
            await add(jobs)
            await until(lambda: not jobs.jobs.listing(Inference, None, is_admin=True) and not files(tmp_path))


class TestTrouble:
    async def test_what_the_store_refuses_leaves_no_file(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await jobs.jobs._store.lend()  # nothing can be saved
            with pytest.raises(NotSavedError):
                await add(jobs)
            assert not files(tmp_path)
            assert not jobs.jobs.listing(Inference, None, is_admin=True)

    async def test_a_mistake_of_ours_fails_the_job(self, tmp_path):
        worker = Worker()
        worker.answers = [KeyError("oops")]
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            assert (job.state, job.error["code"]) == ("failed", "internal_error")
            assert "oops" not in job.error["message"]

    async def test_a_lost_request_fails_the_job(self, tmp_path):
        async with opened(tmp_path) as jobs:
            job = await add(jobs)
            next((tmp_path / "jobs").iterdir()).unlink()
            jobs.start(Worker())
            await until(lambda: job.is_over)
            assert (job.state, job.error["code"]) == ("failed", "job_not_kept")

    async def test_a_result_without_room_fails_the_job(self, tmp_path):
        worker = Worker()
        worker.answers = [Answer(200, "", b" " * (2 << 20))]
        async with opened(tmp_path, worker, jobs_mib=1) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            assert (job.state, job.result_bytes, job.error["code"]) == ("failed", None, "job_not_kept")

    async def test_a_file_that_cannot_be_removed(self, tmp_path):
        """Its job is over all the same; the next start removes what is left."""
        worker = Worker()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: worker.sent)
            request = tmp_path / "jobs" / f"{job.id}.request"
            request.unlink()
            request.mkdir()
            worker.open.set()
            await until(lambda: not jobs._running)
            assert job.state == "completed"
            await jobs.remove(job)
            assert jobs.jobs.listing(Inference, None, is_admin=True) == []

    async def test_a_folder_that_is_gone(self, tmp_path):
        async with opened(tmp_path) as jobs:
            (tmp_path / "jobs").rmdir()
            with pytest.raises(NotSavedError):
                await add(jobs)
            assert not jobs.jobs.listing(Inference, None, is_admin=True)

    async def test_a_folder_that_cannot_be_used(self, tmp_path):
        """What is kept waits for a start that can use it."""
        worker = Worker()
        async with opened(tmp_path) as jobs:
            kept = await add(jobs)
        (tmp_path / "jobs").rename(tmp_path / "aside")
        (tmp_path / "jobs").touch()
        async with opened(tmp_path, worker) as jobs:
            with pytest.raises(UnavailableError):
                await add(jobs)
            assert jobs.jobs.find(Inference, kept.id, None, is_admin=True).state == "queued"
            assert not jobs._running


async def test_of_a_store_that_cannot_be_read_all_stay(tmp_path):
    """Such as one on a full disk, which has no room for its new schema: with room its jobs are there again."""
    async with opened(tmp_path) as jobs:
        job = await add(jobs, body=b'{"a": 1}')
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite3")) as state:
        state.execute("PRAGMA user_version = 99")
    async with opened(tmp_path) as jobs:
        assert jobs.jobs.of(Inference) == []
        assert files(tmp_path) == {".request"}
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite3")) as state:
        state.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    worker = Worker()
    worker.open.set()
    async with opened(tmp_path, worker) as jobs:
        await until(lambda: jobs.jobs.get(job.id).is_over)
        assert (jobs.jobs.get(job.id).state, len(worker.sent)) == ("completed", 1)


class TestDurable:
    """A job is over when that is on disk, and never before."""

    async def ended_but_not_saved(self, jobs: InferenceJobs, worker: Worker) -> Inference:
        """A job that has its answer, while nothing can be saved."""
        job = await add(jobs)
        await until(lambda: job.state == "running")
        await jobs.jobs._store.lend()
        worker.open.set()
        await until(lambda: job.id in jobs._awaiting_retry)
        return job

    async def test_one_whose_end_cannot_be_saved_waits(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path, worker) as jobs:
            job = await self.ended_but_not_saved(jobs, worker)
            assert (job.state, job.status, job.result_bytes, job.error) == ("queued", None, None, None)
            assert files(tmp_path) == {".request"}
        async with opened(tmp_path, worker) as jobs:
            again = jobs.jobs.find(Inference, job.id, None, is_admin=True)
            await until(lambda: again.is_over)
            assert (again.state, len(worker.sent)) == ("completed", 2)
        assert files(tmp_path) == {".result"}

    async def test_it_is_sent_again_without_a_restart(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
        worker = Worker()
        async with opened(tmp_path, worker) as jobs:
            job = await self.ended_but_not_saved(jobs, worker)
            await jobs.jobs._store.take_back()
            await until(lambda: job.is_over)
            assert (job.state, job.result_bytes) == ("completed", 2)

    async def test_what_is_seen_as_over_stays_so(self, tmp_path, monkeypatch):
        """Whatever is told of a job, the store has it by then."""
        worker, save, seen = Worker(), Jobs._change, []

        async def saving(self, entries):
            seen.extend(job.state for job in self.of(Job))
            await save(self, entries)

        monkeypatch.setattr(Jobs, "_change", saving)
        worker.open.set()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
        assert "completed" not in seen

    @pytest.mark.parametrize("began", [True, False])
    async def test_cancelling_says_that_it_failed(self, tmp_path, began):
        worker = Worker()
        async with opened(tmp_path) as jobs:
            job = await add(jobs)
            if began:
                jobs.start(worker)
                await until(lambda: job.state == "running")
            await jobs.jobs._store.lend()
            with pytest.raises(NotSavedError):
                await jobs.cancel(job)
            assert job.state == "queued"
            with pytest.raises(NotSavedError):
                await jobs.remove(job)
            assert jobs.jobs.listing(Inference, None, is_admin=True) == [job]

    async def test_old_results_make_room_even_if_nothing_can_be_saved(self, tmp_path):
        worker = Worker()
        worker.open.set()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            await jobs.jobs._store.lend()
            jobs.configure(JobsConfig(jobs_keep_s=1e-6))
            await jobs.jobs.expire()
            assert (job.result_bytes, files(tmp_path)) == (None, set())

    async def test_on_a_disk_that_is_full_of_results_one_can_be_removed(self, tmp_path, monkeypatch):
        worker, change = Worker(), Jobs._change

        async def changed(self, entries):
            if ".result" in files(tmp_path):
                raise NotSavedError("the disk is full")
            await change(self, entries)

        worker.open.set()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
            monkeypatch.setattr(Jobs, "_change", changed)
            await jobs.remove(job)
            assert not jobs.jobs._store.items("jobs")
            assert not jobs.jobs.listing(Inference, None, is_admin=True)

    async def test_its_response_is_kept_before_it_is_forgotten(self, tmp_path):
        """Whoever keeps what came of it (`on_end`) is waited for, and may refuse."""
        worker, kept = Worker(), asyncio.Event()
        worker.open.set()

        async def keep(_job: Inference, _answer: Answer | None) -> None:
            await kept.wait()

        async with opened(tmp_path, worker) as jobs:
            jobs.on_end[Response] = keep
            job = await jobs.add("/v1/responses", "m", {}, b"{}", None, FOR_RESPONSE)
            await until(lambda: job.tries)
            assert jobs.generating("resp_1") is job
            assert jobs.jobs._store.items("jobs")
            kept.set()
            await until(lambda: not jobs.jobs._store.items("jobs") and not files(tmp_path))

    async def test_a_response_that_cannot_be_kept_leaves_its_job(self, tmp_path):
        worker = Worker()
        worker.open.set()

        async def refuse(_job: Inference, _answer: Answer | None) -> None:
            raise NotSavedError("the disk is full")

        async with opened(tmp_path, worker) as jobs:
            jobs.on_end[Response] = refuse
            job = await jobs.add("/v1/responses", "m", {}, b"{}", None, FOR_RESPONSE)
            await until(lambda: job.id in jobs._awaiting_retry)
            assert (job.state, jobs.generating("resp_1")) == ("queued", job)
            assert files(tmp_path) == {".request"}


class TestRestart:
    async def test_not_for_ever_if_the_daemon_dies_of_it(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path) as jobs:
            taken = await add(jobs)
        for sent in range(1, module.DEATHS + 1):
            async with opened(tmp_path, worker) as jobs:
                await until(lambda sent=sent: len(worker.sent) == sent)
                await jobs.jobs._store.lend()  # nothing is saved any more, as if it died now
        async with opened(tmp_path, worker) as jobs:
            job = jobs.jobs.find(Inference, taken.id, None, is_admin=True)
            await until(lambda: job.is_over)
            assert (job.state, job.tries, job.error["code"]) == ("failed", module.DEATHS, "job_given_up")
            assert len(worker.sent) == module.DEATHS

    async def test_ends_of_the_daemon_are_no_deaths(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path) as jobs:
            taken = await add(jobs)
        for sent in range(1, module.DEATHS + 2):
            async with opened(tmp_path, worker) as jobs:
                await until(lambda sent=sent: len(worker.sent) == sent)
        worker.open.set()
        async with opened(tmp_path, worker) as jobs:
            job = jobs.jobs.find(Inference, taken.id, None, is_admin=True)
            await until(lambda: job.is_over)
            assert (job.state, job.tries, job.deaths) == ("completed", module.DEATHS + 2, 0)

    async def test_what_cannot_be_counted_is_not_sent(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path) as jobs:
            job = await add(jobs)
            await jobs.jobs._store.lend()
            jobs.start(worker)
            await until(lambda: job.id in jobs._awaiting_retry)
            assert (job.state, worker.sent) == ("queued", [])

    async def test_an_end_waits_for_what_is_being_kept(self, tmp_path):
        worker = Worker()
        async with opened(tmp_path, worker) as jobs:
            found = [await add(jobs) for _ in range(8)]
            await until(lambda: len(worker.sent) == 8)
            worker.open.set()
            await asyncio.sleep(0)
        async with opened(tmp_path) as jobs:
            states = {jobs.jobs.find(Inference, job.id, None, is_admin=True).state for job in found}
            assert states <= {"completed", "queued"}
            for job in jobs.jobs.listing(Inference, None, is_admin=True):
                assert (tmp_path / "jobs" / f"{job.id}.{'result' if job.is_over else 'request'}").exists()

    async def test_files_of_nobody_go(self, tmp_path):
        async with opened(tmp_path, Worker()) as jobs:
            job = await add(jobs)
            (tmp_path / "jobs" / "job_0.result").touch()
            (tmp_path / "jobs" / f"{job.id}.result").touch()
        async with opened(tmp_path):
            assert files(tmp_path) == {".request"}

    async def test_a_lost_result_is_told(self, tmp_path):
        worker = Worker()
        worker.open.set()
        async with opened(tmp_path, worker) as jobs:
            job = await add(jobs)
            await until(lambda: job.is_over)
        next((tmp_path / "jobs").iterdir()).unlink()
        async with opened(tmp_path) as jobs:
            found = jobs.jobs.find(Inference, job.id, None, is_admin=True)
            assert (found.state, found.result_bytes) == ("completed", None)
            with pytest.raises(LlmuxError):
                await jobs.result(found)


class TestWhose:
    async def test_another_key_finds_nothing(self, tmp_path):
        async with opened(tmp_path) as jobs:
            job = await add(jobs, "ann")
            assert jobs.jobs.listing(Inference, "bob", is_admin=False) == []
            assert jobs.jobs.find(Inference, job.id, "ann", is_admin=False) is job
            with pytest.raises(LlmuxError, match="no job"):
                jobs.jobs.find(Inference, job.id, "bob", is_admin=False)

    async def test_those_of_names_go_to_the_ids_that_these_had_first(self, tmp_path):
        """Before keys had ids, jobs were of their names."""

        def key(name: str, secret: str) -> Key:
            return Key(name, hashlib.sha256(secret.encode()).digest(), frozenset())

        ann, bob, later = key("ann", "a"), key("bob", "b"), key("cid", "c")
        async with opened(tmp_path) as jobs:
            ids = [(await add(jobs, name)).id for name in ("ann", "bob", "cid")]
        for keys in ((ann, bob), (key("ann", "new"), bob, later)):  # an upgrade, and a later start with another ann
            store = await Store.open(tmp_path / "state.sqlite3")
            owners = await former_owners(store, keys)
            jobs = Jobs()
            jobs.open(store, owners)
            assert [job.id for job in jobs.listing(Inference, ann.id, is_admin=False)] == [ids[0]]
            assert [job.id for job in jobs.listing(Inference, bob.id, is_admin=False)] == [ids[1]]
            for stranger in (keys[0].id, later.id):
                assert stranger == ann.id or not jobs.listing(Inference, stranger, is_admin=False)
            await store.close()
