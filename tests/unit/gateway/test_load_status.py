"""What a stream is told while its request waits."""

from __future__ import annotations

import json

import pytest

from supervisor.core.types import ModelId
from supervisor.core.waiting import Forecast, WaitKind, WaitReason
from supervisor.dialects.openai import OPENAI
from supervisor.engine.waits import Wait, _Phase
from supervisor.gateway.load_status import PROGRESS_S, LoadNews
from supervisor.gateway.request import Request

LOAD = WaitReason(WaitKind.LOAD, "the model to load")


class Engine:
    """A clock and a forecast that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told = "about 20 s"

    def clock(self) -> float:
        return self.now

    def forecast(self, _model: ModelId) -> Forecast:
        return Forecast(None, self.told)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def phase():
    return _Phase(WaitReason(WaitKind.DRAIN, "b to end its requests"), 100.0)


@pytest.fixture
def tell(engine, phase):
    """The next line, or None."""
    context = Request(b"req_1", 100.0, OPENAI, name="a")
    context.waits.append(Wait(ModelId("a"), 100.0, phase))
    news = LoadNews(engine, context, OPENAI.reasoning("/v1/chat/completions"))

    def tell() -> str | None:
        event = news()
        return event and json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]["reasoning_content"]

    tell.context = context
    return tell


class TestLines:
    """One for each thing that is awaited, and progress only while it loads."""

    def test_what_is_awaited_is_told_once(self, engine, phase, tell):
        engine.told = "at most 5 min, then about 20 s"
        assert tell() == "Loading a: waits for b to end its requests, at most 5 min, then about 20 s.\n"
        engine.now += 60
        assert tell() is None
        phase.next = _Phase(LOAD, engine.now)
        engine.told = "about 20 s"
        assert tell() == "Loading a: about 20 s.\n"

    def test_progress(self, engine, phase, tell):
        phase.next = _Phase(LOAD, 100.0)
        assert tell() == "Loading a: about 20 s.\n"
        engine.now += PROGRESS_S - 0.1
        assert tell() is None
        engine.now += 0.1
        engine.told = "about 15 s"
        assert tell() == "Loading a: about 15 s; 5 s so far.\n"
        assert tell() is None

    def test_a_loaded_model_does_not_load(self, phase, tell):
        phase.next = _Phase(WaitReason(WaitKind.PLACE, "a free place: the model answers 4 at once"), 100.0)
        assert tell() == "a waits for a free place: the model answers 4 at once.\n"

    def test_nothing_once_the_wait_is_over(self, tell):
        tell.context.waits[-1].end(101.0)
        assert tell() is None
