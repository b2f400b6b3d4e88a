"""Pulls on their way; `tests/e2e/dialects/test_runner_loads.py` has real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

from supervisor.catalog import Configuration
from supervisor.core.types import ModelId
from supervisor.daemon.pulls import Pulls

MODEL = ModelId("m")


async def nothing(*_: object) -> None:
    return None


class TestCancelling:
    async def test_before_it_has_begun(self):
        """Its task had no turn yet, and so never gets one: the model can be pulled again all the same."""
        pulls = Pulls()
        pulls.open(Configuration(Path("/nowhere/llmux.yaml")), nothing)
        first = pulls.begin(MODEL, nothing)
        pulls.cancel(MODEL)
        async with asyncio.timeout(30):
            while first.took_s is None:
                await asyncio.sleep(0)
        assert (first.state, first.error) == ("failed", "it was cancelled")
        second = pulls.begin(MODEL, nothing)
        assert second is not first
        await pulls.close()

    async def test_the_next_one_is_another(self):
        """Before the cancelled one has ended: who asks now wants the files."""
        pulls = Pulls()
        pulls.open(Configuration(Path("/nowhere/llmux.yaml")), nothing)
        first = pulls.begin(MODEL, nothing)
        pulls.cancel(MODEL)
        second = pulls.begin(MODEL, nothing)
        assert second is not first
        assert pulls.current(MODEL) is second
        await pulls.close()


class TestJoining:
    async def test_each_gets_what_it_wants(self, monkeypatch):
        """One fetches the files alone, the next loads the model as well."""
        came = asyncio.Event()

        async def fetch(*_: object) -> None:
            await came.wait()

        async def load() -> str:
            return "7"

        monkeypatch.setattr(Pulls, "_fetch", fetch)
        pulls = Pulls()
        pulls.open(Configuration(Path("/nowhere/llmux.yaml")), nothing)
        pull = pulls.begin(MODEL, nothing)
        assert pulls.begin(MODEL, load) is pull
        came.set()
        async with asyncio.timeout(30):
            while pull.took_s is None:
                await asyncio.sleep(0)
        assert (pull.state, pull.load) == ("done", "7")
        assert pulls.current(MODEL) is None

    async def test_no_number_comes_again_after_a_restart(self, monkeypatch):
        """A client that asks for its old task must not be told of another one."""
        numbers = []
        for now_s in (1000, 1001):
            monkeypatch.setattr("time.time_ns", lambda now_s=now_s: now_s * 10**9)
            pulls = Pulls()
            pulls.open(Configuration(Path("/nowhere/llmux.yaml")), nothing)
            numbers.append(pulls.begin(MODEL, nothing).id)
            await pulls.close()
        assert len({*numbers}) == 2
