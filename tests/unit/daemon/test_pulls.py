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
