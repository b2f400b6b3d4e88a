"""The hub: events reach everybody who listens, and nobody who is slow holds it up."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.engine.events import BACKLOG, SUBSCRIBERS, Hub
from supervisor.errors import UnavailableError


class TestHub:
    """Publishing never waits for anybody."""

    async def test_a_subscriber_gets_its_kinds_in_order(self):
        hub = Hub()
        with hub.subscribe(("alert",)) as subscription:
            for number in range(3):
                hub.publish("alert", {"number": number})
                hub.publish("reload", {})
            events = await subscription.next(1)
            assert [event.data["number"] for event in events] == [0, 1, 2]
            assert [event.seq for event in events] == [1, 3, 5]
            assert events[0].encoded() == b'event: alert\nid: 1\ndata: {"number":0}\n\n'
            assert await subscription.next(0.01) == []

    async def test_one_that_does_not_read_is_dropped_and_others_are_not(self):
        hub = Hub()
        slow, quick = hub.subscribe(("alert",)), hub.subscribe(("alert",))
        got = 0
        for _ in range(BACKLOG + 1):
            hub.publish("alert", {})
            got += len(await quick.next(1))
        assert got == BACKLOG + 1
        assert await slow.next(1) is None
        hub.close()

    async def test_nobody_is_wanted_when_nobody_listens(self):
        hub = Hub()
        with hub.subscribe(("alert",)):
            assert hub.wants("alert")
            assert not hub.wants("model")
        assert not hub.wants("alert")

    async def test_listeners_are_limited_and_end_with_the_daemon(self):
        hub = Hub()
        held = [hub.subscribe(("alert",)) for _ in range(SUBSCRIBERS)]
        with pytest.raises(UnavailableError):
            hub.subscribe(("alert",))
        waiting = asyncio.create_task(held[0].next(60))
        await asyncio.sleep(0)
        hub.close()
        assert await waiting is None
