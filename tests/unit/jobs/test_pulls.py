"""Pulls on their way; `tests/e2e/dialects/test_runner_loads.py` has real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from supervisor.catalog import Configuration
from supervisor.core.types import ModelId
from supervisor.errors import UnavailableError
from supervisor.host.store.store import Store
from supervisor.jobs.job import Pull
from supervisor.jobs.jobs import Jobs, Progress
from supervisor.jobs.pulls import KEPT, Pulls, progress_of, trouble_of

MODEL = ModelId("m")


async def nothing(*_: object) -> None:
    return None


def opened(jobs: Jobs | None = None) -> Pulls:
    pulls = Pulls(jobs or Jobs())
    pulls.restore()
    pulls.open(Configuration(Path("/nowhere/llmux.yaml")), nothing)
    return pulls


async def over(pull: Pull) -> Pull:
    async with asyncio.timeout(30):
        while not pull.is_over:
            await asyncio.sleep(0)
    return pull


@pytest.fixture
def came(monkeypatch) -> asyncio.Event:
    """Set it, and the files are there."""
    came = asyncio.Event()

    async def fetch(*_: object) -> None:
        await came.wait()

    monkeypatch.setattr(Pulls, "_fetch", fetch)
    return came


class TestCancelling:
    async def test_before_it_has_begun(self):
        """Its task had no turn yet, and so never gets one: the model can be pulled again all the same."""
        pulls = opened()
        first = pulls.begin(MODEL, nothing)
        pulls.cancel(MODEL)
        await over(first)
        assert (first.state, trouble_of(first)) == ("cancelled", "it was cancelled")
        second = pulls.begin(MODEL, nothing)
        assert second is not first
        await pulls.close()

    async def test_the_next_one_is_another(self):
        """Before the cancelled one has ended: who asks now wants the files."""
        pulls = opened()
        first = pulls.begin(MODEL, nothing)
        pulls.cancel(MODEL)
        second = pulls.begin(MODEL, nothing)
        assert second is not first
        assert pulls.current(MODEL) is second
        await pulls.close()

    async def test_as_a_job(self, came):
        jobs = Jobs()
        pulls = opened(jobs)
        pull = pulls.begin(MODEL, nothing)
        await asyncio.sleep(0)
        assert (pull.state, pull.kind, jobs.get(pull.id)) == ("running", "pull", pull)
        for _ in range(2):
            await jobs.cancel(pull)
        assert (pull.state, pulls.current(MODEL)) == ("cancelled", None)


class TestJoining:
    async def test_each_gets_what_it_wants(self, came):
        """One fetches the files alone, the next loads the model as well."""

        async def load() -> str:
            return "7"

        pulls = opened()
        pull = pulls.begin(MODEL, nothing)
        assert pulls.begin(MODEL, load) is pull
        came.set()
        await over(pull)
        assert (pull.state, pull.load, trouble_of(pull)) == ("completed", "load-7", "")
        assert pulls.current(MODEL) is None


class TestProgress:
    def pull(self, **more: object) -> Pull:
        return Pull(id="pull-1", created_at=1000.0, model=MODEL, **more)

    async def test_grows_with_the_bytes(self, monkeypatch):
        monkeypatch.setattr("time.time", lambda: 1010.0)
        pull = self.pull()
        assert (progress_of(pull).share, progress_of(pull).eta_s) == (0.0, None)
        pull.started_at, pull.first_bytes, pull.done_bytes, pull.total_bytes = 1000.0, 100, 100, 400
        assert (progress_of(pull).share, progress_of(pull).eta_s) == (0.25, None), "none has come yet"
        pull.done_bytes = 200
        assert (progress_of(pull).share, progress_of(pull).eta_s) == (0.5, 20.0)
        pull.done_bytes = 400
        assert (progress_of(pull).share, progress_of(pull).eta_s) == (0.99, 0.0)

    @pytest.mark.parametrize(
        ("state", "share", "why"),
        [("completed", 1.0, ""), ("cancelled", 0.5, "it was cancelled"), ("failed", 0.5, "no such file")],
    )
    async def test_of_one_that_has_ended(self, state, share, why):
        """No time is left, and it says why it ended."""
        pull = self.pull(state=state, started_at=1000.0, first_bytes=0, done_bytes=200, total_bytes=400)
        pull.error = {"message": "no such file"} if state == "failed" else None
        assert progress_of(pull) == Progress(share, message=why)


class TestKept:
    """Pulls outlive the daemon, as jobs."""

    async def restart(self, store: Store, jobs: Jobs) -> tuple[Store, Jobs]:
        await asyncio.gather(*jobs._noting)
        await store.close()
        store, jobs = await Store.open(store.path), Jobs()
        jobs.open(store)
        return store, jobs

    @pytest.mark.parametrize("is_killed", [True, False])
    async def test_one_that_was_under_way_is_interrupted(self, tmp_path, came, is_killed):
        store, jobs = await Store.open(tmp_path / "state"), Jobs()
        jobs.open(store)
        pulls = opened(jobs)
        pull = pulls.begin(MODEL, nothing)
        waiting = pulls.begin(ModelId("n"), nothing)
        await asyncio.sleep(0)
        assert (pull.state, waiting.state) == ("running", "queued")
        if not is_killed:
            await pulls.close()
        store, jobs = await self.restart(store, jobs)
        assert [each.state for each in jobs.of(Pull)] == (["running", "queued"] if is_killed else ["interrupted"] * 2)
        later = opened(jobs)
        for old in (pull, waiting):
            found = later.find(old.id.removeprefix("pull-"))
            assert found is not None
            assert (found.state, found.model, later.current(old.model)) == ("interrupted", old.model, None)
            assert "llmux ended" in trouble_of(found)
        await pulls.close()
        await store.close()

    async def test_what_became_of_one(self, tmp_path, monkeypatch):
        async def fetch(*_: object) -> None:
            raise UnavailableError("there is no such repository")

        monkeypatch.setattr(Pulls, "_fetch", fetch)
        store, jobs = await Store.open(tmp_path / "state"), Jobs()
        jobs.open(store)
        pull = await over(opened(jobs).begin(MODEL, nothing))
        store, jobs = await self.restart(store, jobs)
        found = opened(jobs).find(pull.id.removeprefix("pull-"))
        assert found is not None
        assert (found.state, trouble_of(found)) == ("failed", "there is no such repository")
        assert found.ended_at == pull.ended_at
        await store.close()

    async def test_a_successor_has_the_store(self, tmp_path, came):
        """It has read that the pull is under way, and says so itself: nothing is amiss here."""
        store, jobs = await Store.open(tmp_path / "state"), Jobs()
        jobs.open(store)
        pulls = opened(jobs)
        pull = pulls.begin(MODEL, nothing)
        await asyncio.gather(*jobs._noting)
        await store.lend()
        with capture_logs() as told:
            await pulls.close()
            await asyncio.gather(*jobs._noting)
        assert (pull.state, [line["event"] for line in told]) == ("interrupted", ["pull.ended"])

    @pytest.mark.parametrize("now_s", [1001, 900])
    async def test_no_number_comes_again_after_a_restart(self, tmp_path, monkeypatch, came, now_s):
        """A client that asks for its old task must not be told of another one; also where the clock was set back."""
        monkeypatch.setattr("time.time_ns", lambda: 1000 * 10**9)
        store, jobs = await Store.open(tmp_path / "state"), Jobs()
        jobs.open(store)
        pulls = opened(jobs)
        first = pulls.begin(MODEL, nothing)
        store, jobs = await self.restart(store, jobs)
        monkeypatch.setattr("time.time_ns", lambda: now_s * 10**9)
        later = opened(jobs)
        assert later.begin(MODEL, nothing).id != first.id
        await pulls.close()
        await later.close()
        await store.close()

    async def test_the_last_hundred(self, came):
        jobs = Jobs()
        pulls = opened(jobs)
        came.set()
        made = [await over(pulls.begin(MODEL, nothing)) for _ in range(KEPT + 3)]
        assert jobs.of(Pull) == made[3:]
