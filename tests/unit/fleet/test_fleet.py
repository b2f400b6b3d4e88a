"""All replicas together: which class runs a model is its adapter's word, and a mistake ends only whom it concerns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from runtimes.command.adapter import CommandAdapter
from runtimes.model_config import ModelConfig
from runtimes.openai_remote.adapter import OpenAIRemoteAdapter, OpenAIRemoteConfig
from supervisor.catalog import CatalogModel
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.core.effects import StartWorker, StopWorker
from supervisor.core.events import Event, WorkerExited, WorkerReady
from supervisor.core.types import CrashClass, DeviceId, Generation, ModelId, StopCause
from supervisor.fleet.fleet import Fleet
from tests.support.limits import LIMIT_S
from tests.support.scripted_launcher import ScriptedLauncher, look

NEAR, FAR = ModelId("near"), ModelId("far")
FIRST = Generation(1)


def catalog() -> dict[ModelId, CatalogModel]:
    far = OpenAIRemoteConfig(runtime="openai_remote", base_url="http://127.0.0.1:1/v1", upstream_model="m")
    return {
        NEAR: CatalogModel(NEAR, ModelConfig(runtime="command"), CommandAdapter(), Rewrite()),
        FAR: CatalogModel(FAR, far, OpenAIRemoteAdapter(), Rewrite()),
    }


@pytest.fixture
def launcher(tmp_path):
    launcher = ScriptedLauncher(tmp_path)
    launcher.look = look()
    return launcher


@pytest.fixture
def fleet(launcher):
    return Fleet(launcher, catalog(), LimitsConfig())


@pytest.fixture
def events():
    return []


def start(fleet: Fleet, model: ModelId, events: list[Event]) -> None:
    fleet.start(StartWorker(model, FIRST, (DeviceId("gpu0"),), (100,)), events.append)


def stop(model: ModelId) -> StopWorker:
    return StopWorker(model, FIRST, StopCause.OPERATOR, "asked to", force=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_worker_and_a_remote(fleet, launcher, events):
    """The engine sees no difference but that a remote holds no memory."""
    for model in (NEAR, FAR):
        start(fleet, model, events)
    await until(lambda: len(events) == 2)
    assert set(events) == {WorkerReady(NEAR, FIRST), WorkerReady(FAR, FIRST)}
    assert list(launcher.list()) == [(NEAR, FIRST)]
    assert list(fleet.holders()) == [(NEAR, FIRST)]
    assert fleet.upstream(NEAR, FIRST) is not fleet.upstream(FAR, FIRST)
    assert fleet.facts(FAR, FIRST).pid is None
    assert fleet.metrics_source(FAR, FIRST) is None
    for model in (NEAR, FAR):
        fleet.stop(stop(model))
    await until(lambda: len(events) == 4)
    assert set(events[2:]) == {WorkerExited(NEAR, FIRST, None), WorkerExited(FAR, FIRST, None)}
    assert (fleet.holders(), fleet.facts(FAR, FIRST)) == ({}, None)
    fleet.stop(stop(NEAR))


async def test_a_mistake_is_a_crash(fleet, launcher, events):
    """Whatever goes wrong in a replica, the engine hears of its end."""
    launcher.refuse_start = ZeroDivisionError("a mistake")
    start(fleet, NEAR, events)
    start(fleet, FAR, events)
    await until(lambda: len(events) == 2)
    (exited,) = (event for event in events if isinstance(event, WorkerExited))
    assert (exited.model, exited.crash.kind) == (NEAR, CrashClass.UNKNOWN)
    assert "a mistake" in exited.crash.summary
    assert fleet.facts(NEAR, FIRST) is None
    fleet.stop(stop(FAR))
    await until(lambda: len(events) == 3)
