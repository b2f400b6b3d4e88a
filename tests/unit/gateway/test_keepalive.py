"""What a stream's client gets while its request waits: keep-alive comments, and lines of status."""

from __future__ import annotations

import asyncio
import json

import pytest

from supervisor.core.admission.waiting import Forecast, WaitKind, WaitReason
from supervisor.core.types import ModelId
from supervisor.dialects.openai import OPENAI
from supervisor.engine.waits import WaitTrace, _Phase
from supervisor.gateway import keepalive as keepalive_module
from supervisor.gateway.keepalive import PROGRESS_S, Keepalive, LoadStatusEvents
from supervisor.gateway.request import Request

LOAD = WaitReason(WaitKind.LOAD, "the model to load")


class TestKeepalive:
    """Comments only when the wait is long, and never two heads."""

    async def test_short_wait_sends_nothing(self):
        sent = []

        async def send(message):
            sent.append(message)

        async with Keepalive(send, [], OPENAI, interval_s=5) as keepalive:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not keepalive.started
        assert not sent

    async def test_long_wait(self):
        sent = []
        enough = asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) == 4:
                enough.set()

        async with Keepalive(send, [(b"x-request-id", b"r")], OPENAI, interval_s=0.02) as keepalive:
            await enough.wait()
        assert keepalive.started
        count = len(sent)
        await asyncio.sleep(0.06)
        assert len(sent) == count, "silent again after the block"
        assert sent[0]["status"] == 200
        assert (b"x-request-id", b"r") in sent[0]["headers"]
        assert {message["body"] for message in sent[1:]} == {b": keepalive\n\n"}

    async def test_blocked_head_is_not_counted_as_sent(self):
        async def send(message):
            await asyncio.Event().wait()

        async with Keepalive(send, [], OPENAI, interval_s=0.01) as keepalive:
            await asyncio.sleep(0.05)
        assert not keepalive.started


class TestNews:
    """Events that begin the response early, and leave the comments as they are."""

    async def test_news_come_before_the_first_comment_and_comments_go_on(self, monkeypatch):
        monkeypatch.setattr(keepalive_module, "LOAD_STATUS_AFTER_S", 0.01)
        monkeypatch.setattr(keepalive_module, "LOAD_STATUS_INTERVAL_S", 0.01)
        sent = []
        enough = asyncio.Event()
        news = [b"data: 2\n\n", None, b"data: 1\n\n"]

        async def send(message):
            sent.append(message)
            if sum(message.get("body") == b": keepalive\n\n" for message in sent) == 2:
                enough.set()

        asked = Keepalive(send, [], OPENAI, interval_s=0.1, load_status=lambda: news.pop() if news else None)
        async with asked, asyncio.timeout(10):
            await enough.wait()
        bodies = [message["body"] for message in sent if "body" in message]
        assert bodies == [b"data: 1\n\n", b"data: 2\n\n", b": keepalive\n\n", b": keepalive\n\n"]
        assert [message["type"] for message in sent].count("http.response.start") == 1
        assert asked.started

    async def test_no_news_is_no_beginning(self, monkeypatch):
        monkeypatch.setattr(keepalive_module, "LOAD_STATUS_AFTER_S", 0.0)
        monkeypatch.setattr(keepalive_module, "LOAD_STATUS_INTERVAL_S", 0.001)
        sent, asked = [], []

        async def send(message):
            sent.append(message)

        async with Keepalive(send, [], OPENAI, interval_s=60, load_status=lambda: asked.append(None)) as keepalive:
            async with asyncio.timeout(10):
                while len(asked) < 5:
                    await asyncio.sleep(0.001)
        assert (sent, keepalive.started) == ([], False)


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
    context.waits.append(WaitTrace(ModelId("a"), 100.0, phase))
    news = LoadStatusEvents(engine, context, OPENAI.reasoning("/v1/chat/completions"))

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
