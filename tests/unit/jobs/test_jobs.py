"""All jobs in one store: how they are read, changed and forgotten, whatever their kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from supervisor.errors import NotFoundError
from supervisor.host.store.store import NotSavedError, Store
from supervisor.jobs.job import Batch, Inference, Job, Line, Load, Response
from supervisor.jobs.jobs import Jobs, Kind


def inference(name: str = "job_1", owner: str | None = None) -> Inference:
    return Inference(id=name, created_at=1.0, owner=owner, endpoint="/v1/embeddings")


def line(name: str = "job_2") -> Line:
    return Line(id=name, created_at=2.0, endpoint="/v1/embeddings", batch="batch_1", number=3, custom_id="c")


def batch(name: str = "batch_1") -> Batch:
    files = {"input_file": "file-1", "output_file": "file-2", "error_file": "file-3"}
    return Batch(id=name, created_at=0.0, endpoint="/v1/embeddings", window="1h", expires_at=9.0, **files)


async def cancelled(job: Job) -> None:
    job.state = "cancelled"


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Jobs]:
    store = await Store.open(folder / "state.sqlite3")
    jobs = Jobs(dict.fromkeys((Inference, Response, Line, Batch, Load), Kind(cancelled)))
    jobs.open(store)
    try:
        yield jobs
    finally:
        await store.close()


async def kept(jobs: Jobs, *wanted: Job) -> None:
    for job in wanted:
        jobs.add(job)
        await jobs.save(job)


class TestReading:
    async def test_each_is_of_its_kind_after_a_restart(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await kept(jobs, inference(), line(), batch(), Load(id="load-7", created_at=4.0, worker="m"))
        async with opened(tmp_path) as jobs:
            assert [job.id for job in jobs.of(Job)] == ["batch_1", "job_1", "job_2", "load-7"]
            assert [job.kind for job in jobs.of(Job)] == ["batch", "inference", "line", "load"]
            assert [job.id for job in jobs.listing(Inference, None, is_admin=True)] == ["job_2", "job_1"]
            assert [(job.batch, job.number, job.custom_id) for job in jobs.of(Line)] == [("batch_1", 3, "c")]

    async def test_a_row_that_cannot_be_read_stays(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await kept(jobs, inference())
            await jobs._store.put("jobs", "job_0", {"kind": "inference", "id": 3})
        async with opened(tmp_path) as jobs:
            assert [job.id for job in jobs.of(Job)] == ["job_1"]
            assert "job_0" in jobs._store.items("jobs")

    async def test_of_another_kind_or_owner_there_is_none(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await kept(jobs, inference(owner="ann"), batch())
            assert jobs.find(Inference, "job_1", "ann", is_admin=False).owner == "ann"
            for name, kind in (("job_1", Inference), ("job_1", Batch), ("batch_1", Inference), ("x", Job)):
                with pytest.raises(NotFoundError):
                    jobs.find(kind, name, "bob", is_admin=False)

    async def test_a_kind_is_found_with_those_that_are_made_from_it(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await kept(jobs, inference(), batch(), line("job_2"))
        async with opened(tmp_path) as jobs:
            found = {kind: [job.id for job in jobs.of(kind)] for kind in (Job, Inference, Line, Batch, Load)}
            assert sorted(found[Job]) == ["batch_1", "job_1", "job_2"]
            assert sorted(found[Inference]) == ["job_1", "job_2"]
            assert (found[Line], found[Batch], found[Load]) == (["job_2"], ["batch_1"], [])
            jobs.drop(jobs.get("job_2"))
            assert [[job.id for job in jobs.of(kind)] for kind in (Line, Inference)] == [[], ["job_1"]]
            assert jobs.get("job_2") is None


class TestChanging:
    async def test_what_cannot_be_written_has_not_changed(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await kept(jobs, job := batch())
            await jobs._store.lend()
            with pytest.raises(NotSavedError):
                await jobs.change(job, state="running", total=3)
            assert (job.state, job.total) == ("queued", 0)

    async def test_changes_at_once_are_all_on_disk(self, tmp_path):
        async with opened(tmp_path) as jobs:
            await kept(jobs, job := batch())
            await asyncio.gather(
                jobs.change(job, {("files", "file-2"): {"a": 1}}, state="running", total=3),
                jobs.change(job, cancelling_at=5.0),
            )
        async with opened(tmp_path) as jobs:
            [job] = jobs.of(Batch)
            assert (job.state, job.total, job.cancelling_at) == ("running", 3, 5.0)
            assert jobs._store.get("files", "file-2") == {"a": 1}

    async def test_one_that_is_over_is_not_cancelled(self, tmp_path):
        async with opened(tmp_path) as jobs:
            job = inference()
            job.state = "completed"
            await jobs.cancel(job)
            assert job.state == "completed"


class TestForgetting:
    async def test_each_kind_keeps_so_many_for_so_long(self, tmp_path):
        async with opened(tmp_path) as jobs:
            jobs.kinds[Inference] = Kind(cancelled, most=2)
            jobs.kinds[Batch] = Kind(cancelled, keep_s=lambda: 60.0)
            over = [inference(f"job_{number}") for number in range(4)]
            for job in (*over, old := batch()):
                job.state, job.ended_at = "completed", 1.0
            await kept(jobs, *over, old, batch("batch_2"), line("job_5"))
            await jobs.expire(Inference)
            assert [job.id for job in jobs.of(Job)] == ["job_2", "job_3", "batch_1", "batch_2", "job_5"]
            await jobs.expire()
            assert [job.id for job in jobs.of(Job)] == ["job_2", "job_3", "batch_2", "job_5"]
            assert {*jobs._store.items("jobs")} == {"job_2", "job_3", "batch_2", "job_5"}

    async def test_what_they_have_goes_after_the_records_or_to_make_room_for_that(self, tmp_path):
        async with opened(tmp_path) as jobs:
            gone: list[list[str]] = []
            jobs.kinds[Inference] = Kind(cancelled, forget=lambda jobs: gone.append([job.id for job in jobs]))
            await kept(jobs, one := inference())
            await jobs._store.lend()
            with pytest.raises(NotSavedError):
                await jobs.forget([one])
            assert (gone, jobs.get(one.id)) == ([[one.id]], one)
            await jobs._store.take_back()
            await jobs.forget([one])
            assert (gone[1:], jobs.get(one.id), jobs._store.items("jobs")) == ([[one.id]], None, {})


async def test_who_waits_is_woken_by_a_change_of_any(tmp_path):
    async with opened(tmp_path) as jobs:
        before, waiting = jobs.version, asyncio.create_task(jobs.changed(60))
        await asyncio.sleep(0)
        jobs.add(inference())
        await asyncio.wait_for(waiting, 10)
        assert jobs.version > before
