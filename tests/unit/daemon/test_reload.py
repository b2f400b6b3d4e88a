"""Who asks for a reload while one runs."""

from __future__ import annotations

import asyncio

import pytest
import yaml

from supervisor.catalog import Configuration
from supervisor.daemon.configuration import reload
from supervisor.daemon.configuration.reload import Reloader
from supervisor.errors import ConfigError
from tests.support.application import Served, serving
from tests.support.daemon import fake


@pytest.fixture
async def served(tmp_path, monkeypatch):
    monkeypatch.setattr(reload, "STILL_S", 0.05)
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture
def reloader(served: Served, tmp_path):
    return Reloader(served.daemon, Configuration(tmp_path / "llmux.yaml"), "127.0.0.1")


async def begun(reloader: Reloader, cause: str) -> asyncio.Task:
    """A reload that runs."""
    task = reloader.begin(cause)
    await has_begun(reloader)
    assert not task.done()
    return task


async def has_begun(reloader: Reloader) -> None:
    """Until nobody waits for his turn."""
    while reloader._next_request is not None:
        await asyncio.sleep(0)


def configure(path, **models):
    fresh = path / "fresh.yaml"
    fresh.write_text(yaml.safe_dump({"models": models, "server": {"state_dir": str(path)}}))
    fresh.replace(path / "llmux.yaml")


class TestThoseThatWait:
    """One reload serves all who asked before it began, and nobody who asked later."""

    async def test_are_one(self, served, reloader):
        first = await begun(reloader, "first")
        waiting = {reloader.begin(cause) for _ in range(100) for cause in ("asked by API", "SIGHUP")}
        assert len(waiting) == 1
        await asyncio.gather(*waiting, *(reloader.reload("asked by API") for _ in range(10)))
        assert first.done()
        causes = [line["cause"] for line in served.logged if line["event"] == "reload.finished"]
        assert causes == ["first", "asked by API, SIGHUP"]

    async def test_see_what_was_written_before_they_asked(self, served, reloader, tmp_path):
        await begun(reloader, "before")
        for number in range(5):
            configure(tmp_path, plain=fake(), **{f"m{each}": fake() for each in range(number + 1)})
            task = reloader.begin(f"number {number}")
            await asyncio.sleep(0)
        await task
        assert {"plain", *(f"m{each}" for each in range(5))} == set(served.daemon.catalog.models)

    async def test_are_not_joined_once_they_have_begun(self, reloader):
        first = await begun(reloader, "first")
        second = reloader.begin("second")
        await first
        await has_begun(reloader)
        assert not second.done()
        third = reloader.begin("third")
        assert third is not second
        await third

    async def test_with_one_who_insists(self, reloader, tmp_path):
        first = await begun(reloader, "first")
        await first
        configure(tmp_path)
        running = await begun(reloader, "running")
        quiet, insists = reloader.begin("quiet"), reloader.begin("insists", force=True)
        assert isinstance(await running, ConfigError)
        assert quiet is insists
        assert (await insists).removed == ("plain",)
        configure(tmp_path, plain="nothing")
        with pytest.raises(ConfigError):
            await reloader.reload("later")
