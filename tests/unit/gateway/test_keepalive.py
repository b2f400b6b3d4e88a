"""Keep-alive comments."""

from __future__ import annotations

import asyncio

from supervisor.dialects.openai import OPENAI
from supervisor.gateway import keepalive as keepalive_module
from supervisor.gateway.keepalive import Keepalive


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
        monkeypatch.setattr(keepalive_module, "NEWS_AFTER_S", 0.01)
        monkeypatch.setattr(keepalive_module, "NEWS_INTERVAL_S", 0.01)
        sent = []
        enough = asyncio.Event()
        news = [b"data: 2\n\n", None, b"data: 1\n\n"]

        async def send(message):
            sent.append(message)
            if sum(message.get("body") == b": keepalive\n\n" for message in sent) == 2:
                enough.set()

        asked = Keepalive(send, [], OPENAI, interval_s=0.1, news=lambda: news.pop() if news else None)
        async with asked, asyncio.timeout(10):
            await enough.wait()
        bodies = [message["body"] for message in sent if "body" in message]
        assert bodies == [b"data: 1\n\n", b"data: 2\n\n", b": keepalive\n\n", b": keepalive\n\n"]
        assert [message["type"] for message in sent].count("http.response.start") == 1
        assert asked.started

    async def test_no_news_is_no_beginning(self, monkeypatch):
        monkeypatch.setattr(keepalive_module, "NEWS_AFTER_S", 0.0)
        monkeypatch.setattr(keepalive_module, "NEWS_INTERVAL_S", 0.001)
        sent, asked = [], []

        async def send(message):
            sent.append(message)

        async with Keepalive(send, [], OPENAI, interval_s=60, news=lambda: asked.append(None)) as keepalive:
            async with asyncio.timeout(10):
                while len(asked) < 5:
                    await asyncio.sleep(0.001)
        assert (sent, keepalive.started) == ([], False)
