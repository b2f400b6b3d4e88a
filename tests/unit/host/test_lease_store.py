"""Leases in a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from supervisor.errors import ConfigError
from supervisor.host.store.lease_store import (
    BEGUN,
    LOOK,
    PREFIX,
    TAKE,
    LeaseStore,
    Refusal,
    Share,
    StoreUnreachableError,
)
from tests.support.redis_server import RedisServer, needs_redis

pytestmark = needs_redis
DOCUMENT = Path(__file__).parents[3] / "docs" / "leases.md"
GPU, OTHER = "GPU-1", "GPU-2"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
async def store(server):
    begin(server)
    async with contextlib.aclosing(Opened(server.url)) as store:
        yield store


def begin(server: RedisServer) -> None:
    """Empty, and old enough to give leases."""
    server.ask("FLUSHALL")
    server.ask("SET", BEGUN, "1")


def full(device: str) -> Refusal:
    return Refusal(device)


class Opened(LeaseStore):
    async def aclose(self) -> None:
        await self.close()


def share(mib: int, most: int = 1000) -> Share:
    return Share(mib, most)


class TestTake:
    """The sum of all holders' leases never exceeds the device's limit."""

    async def test_as_long_as_there_is_room(self, store):
        assert await store.take("a", {GPU: share(600)}, 60.0) is None
        assert await store.take("b", {GPU: share(500)}, 60.0) == full(GPU)
        assert await store.take("b", {GPU: share(400)}, 60.0) is None
        assert await store.look([GPU, OTHER]) == (True, {GPU: {"a": 600, "b": 400}, OTHER: {}})

    async def test_all_devices_or_none(self, store):
        await store.take("a", {OTHER: share(600)}, 60.0)
        assert await store.take("b", {GPU: share(500), OTHER: share(500)}, 60.0) == full(OTHER)
        assert await store.look([GPU, OTHER]) == (True, {GPU: {}, OTHER: {"a": 600}})

    async def test_many_at_once(self, store, server):
        others = [Opened(server.url) for _ in range(8)]
        taking = (others[n % 8].take(f"h{n}", {OTHER: share(150), GPU: share(150)}, 60.0) for n in range(40))
        refused = await asyncio.gather(*taking)
        assert refused.count(None) == 6
        assert sum((await store.look([GPU]))[1][GPU].values()) == 900
        for other in others:
            await other.close()

    async def test_to_renew_needs_no_room(self, store):
        await store.take("a", {GPU: share(600)}, 60.0)
        assert await store.take("a", {GPU: share(600, most=100)}, 60.0) is None

    async def test_to_have_more_does(self, store):
        await store.take("a", {GPU: share(600)}, 60.0)
        assert await store.take("a", {GPU: share(1200)}, 60.0) == full(GPU)

    async def test_what_is_given_back_is_for_others(self, store):
        await store.take("a", {GPU: share(600)}, 60.0)
        await store.release("a", [GPU])
        assert await store.take("b", {GPU: share(1000)}, 60.0) is None


class TestExpiry:
    """A lease ends by the clock of Redis."""

    async def test_it_ends(self, store):
        await store.take("a", {GPU: share(600)}, 0.05)
        async with asyncio.timeout(60):
            while await store.take("b", {GPU: share(1000)}, 60.0) is not None:
                await asyncio.sleep(0.01)
        assert await store.look([GPU]) == (True, {GPU: {"b": 1000}})

    async def test_what_is_no_lease_counts_for_nothing(self, store, server):
        server.ask("HSET", PREFIX + GPU, "somebody", "much")
        assert await store.look([GPU]) == (True, {GPU: {}})
        assert await store.take("a", {GPU: share(1000)}, 60.0) is None


class TestTrouble:
    async def test_nobody_there(self, tmp_path):
        store = Opened("redis://127.0.0.1:1/0")
        with pytest.raises(StoreUnreachableError, match="can't be reached"):
            await store.look([GPU])
        await store.close()

    async def test_it_comes_back(self, tmp_path):
        server = RedisServer(tmp_path).start()
        begin(server)
        store = Opened(server.url)
        await store.take("a", {GPU: share(600)}, 60.0)
        server.stop()
        with pytest.raises(StoreUnreachableError):
            await store.take("a", {GPU: share(600)}, 60.0)
        server.start()
        assert await store.take("b", {GPU: share(600)}, 60.0) == Refusal(None)  # it may have forgotten others
        assert await store.take("a", {GPU: share(600)}, 60.0, has_it=True) is None
        assert await store.look([GPU]) == (False, {GPU: {"a": 600}})
        await store.close()
        server.stop()

    def test_no_url(self):
        with pytest.raises(ConfigError, match=r"server\.leases"):
            LeaseStore("redis://127.0.0.1:port/0")


def test_the_document_has_the_scripts():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert TAKE in text
    assert LOOK in text
