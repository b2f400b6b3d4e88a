"""Loads as jobs: what is kept of them, and how much longer one takes; `tests/e2e/http/test_loads.py` has real ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from supervisor.core.types import ModelId
from supervisor.engine.events import Hub
from supervisor.host.store.store import Store
from supervisor.jobs.job import Load
from supervisor.jobs.jobs import Jobs
from supervisor.jobs.loads import KEPT, MOST_SHARE, Loads, progress_of
from tests.support.cases import cases


def load(number: int = 1, **more: object) -> Load:
    return Load(**{"id": f"load-{number}", "created_at": 100.0, "model": "m", "worker": ModelId("m"), **more})


def loads(jobs: Jobs) -> Loads:
    found = Loads(SimpleNamespace(observers=[]), SimpleNamespace(), Hub(), jobs)
    found.restore()
    return found


@cases(
    ("known", "eta_s"),
    [
        ({}, None),
        ({"share": 0.01}, None),
        ({"share": 0.25}, 30.0),
        ({"share": MOST_SHARE}, None),  # all is read: what else the program does takes as long as it takes
        ({"expected_s": 15.0}, 5.0),
        ({"expected_s": 15.0, "share": 0.25}, 5.0),
        ({"expected_s": 5.0, "share": 0.25}, 30.0),
        ({"expected_s": 5.0, "share": MOST_SHARE}, None),
    ],
)
def test_time_left(known, eta_s, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 110.0)
    progress = progress_of(load(state="running", started_at=100.0, **known))
    assert progress.eta_s == (None if eta_s is None else pytest.approx(eta_s))


@cases(("state", "message"), [("running", "reading"), ("cancelled", "cancelled by an operator"), ("completed", "why")])
def test_what_is_told_of_it(state, message):
    """What its worker does, and once it has ended why."""
    reason = "cancelled by an operator" if state == "cancelled" else "why"
    assert progress_of(load(state=state, reason=reason, stage="reading")).message == message


class TestKept:
    async def test_one_that_was_under_way_is_interrupted_and_stays_so(self, tmp_path):
        store, jobs = await Store.open(tmp_path / "state"), Jobs()
        jobs.open(store)
        for number, state in enumerate(("completed", "running", "queued"), 8):
            await jobs.save(load(number, state=state))
        for _ in range(2):
            jobs = Jobs()
            jobs.open(store)
            found = loads(jobs).views().data
            assert [(each.id, each.state) for each in found] == [
                ("10", "interrupted"),
                ("9", "interrupted"),
                ("8", "ready"),
            ]
            await asyncio.gather(*jobs._noting)
        assert [row["state"] for row in store.items("jobs").values()] == ["interrupted", "completed", "interrupted"]
        await store.close()

    async def test_the_last_hundred_that_ended(self, tmp_path):
        store, jobs = await Store.open(tmp_path / "state"), Jobs()
        jobs.open(store)
        for number in range(KEPT + 5):
            await jobs.save(load(number, created_at=number, state="running" if number % 2 else "completed"))
        jobs.open(store)
        loads(jobs)
        assert sorted(each.created_at for each in jobs.of(Load)) == [*range(5, KEPT + 5)]
        await asyncio.gather(*jobs._noting)
        assert len(store.items("jobs")) == KEPT
        await store.close()

    def test_the_last_of_a_model_is_the_last_that_ended(self):
        jobs = Jobs()
        for number, ended_at in enumerate((130.0, 120.0, 130.0, 110.0, None), 1):
            state = "queued" if ended_at is None else "completed"
            jobs.add(load(number, ended_at=ended_at, state=state))
        jobs.add(load(9, ended_at=140.0, state="failed", model="other"))
        found = Loads(SimpleNamespace(observers=[]), SimpleNamespace(), Hub(), jobs).last(ModelId("m"))
        assert found is not None
        assert found.id == "3"

    def test_an_id_that_is_no_number(self):
        """Such as in a file that somebody edited: it stays in the list, and the next number is one."""
        jobs = Jobs()
        for name in ("load-x", "load-" + "9" * 5000, "load-7"):
            jobs.add(load(id=name, state="failed"))
        assert next(each.id for each in loads(jobs).views().data) == "7"
