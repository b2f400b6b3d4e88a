"""Stored responses: bounded by bytes, count and age, found by their owners, and by other processes."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from supervisor.errors import UnavailableError
from supervisor.host.store import response_store
from supervisor.host.store.response_store import PIECE, EventLog, Part, ResponseStore, StoredResponse

RESPONSE = b'{"id":"r",\n"status":"completed"}'


def kept(size=10, owner="ann", **keys):
    return StoredResponse(owner, Part(RESPONSE), Part(b'"' + b"x" * size + b'"'), **keys)


async def read(found):
    """All fields of a stored response."""
    response, items = bytes(await found.response.whole()), bytes(await found.items.whole())
    return found.owner, found.status, found.is_background, found.is_streamed, response, items


async def found(store, *args, **keys):
    return await read(await store.find(*args, **keys))


def opened(folder, most_bytes=1 << 20, most=100, keep_s=60.0):
    store = ResponseStore()
    store.configure(most_bytes=most_bytes, most=most, keep_s=keep_s)
    store.open(folder)
    return store


async def names(store, *wanted):
    return [name for name in wanted if await store.find(name, "ann") is not None]


class TestFound:
    async def test_at_once_and_when_it_is_written(self, tmp_path):
        store = opened(tmp_path)
        written = store.keep("resp_1", kept())
        assert await found(store, "resp_1", "ann") == await read(kept())
        await written
        assert await found(store, "resp_1", "ann") == await read(kept())

    async def test_by_nobody_else_but_an_admin(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept())
        assert await store.find("resp_1", "bob") is None
        assert await store.find("resp_1", None) is None
        assert await found(store, "resp_1", "bob", is_admin=True) == await read(kept())

    async def test_by_another_process_on_the_folder(self, tmp_path):
        """A daemon that hands over still ends streams."""
        first, second = opened(tmp_path), opened(tmp_path)
        await first.keep("resp_1", kept())
        assert await found(second, "resp_1", "ann") == await read(kept())
        assert await found(opened(tmp_path), "resp_1", "ann") == await read(kept())

    async def test_one_that_is_half_written_is_none(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept())
        (file,) = (tmp_path / "responses").iterdir()
        file.write_bytes(file.read_bytes()[:-5])
        assert await store.find("resp_1", "ann") is None

    @pytest.mark.parametrize("name", ["", "..", "a/b", "a.json", "x" * 101, "a\0"])
    async def test_names_are_no_paths(self, tmp_path, name):
        store = opened(tmp_path)
        assert store.keep(name, kept()) is None
        assert await store.find(name, "ann") is None

    async def test_a_worker_cannot_replace_one(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept())
        assert store.keep("resp_1", kept(owner="bob")) is None
        await store.keep("resp_1", kept(20), replaces=True)
        assert await found(store, "resp_1", "ann") == await read(kept(20))

    async def test_one_of_a_name_is_for_the_key_that_had_it(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept())
        store.owners = {"ann": "key_1"}
        assert await found(store, "resp_1", "key_1") == await read(kept())
        assert await store.find("resp_1", "ann") is None
        assert await store.find("resp_1", None) is None

    async def test_with_all_that_is_known_of_it(self, tmp_path):
        store = opened(tmp_path)
        one = kept(status="queued", is_background=True, is_streamed=True)
        store.keep("resp_1", one)
        assert await found(store, "resp_1", "ann") == await read(one)

    async def test_one_of_a_former_version(self, tmp_path):
        store = opened(tmp_path)
        response, items = RESPONSE.decode(), '[{"role":"user","content":"Hi"}]'
        for name, more in {"resp_1": "", "resp_2": ',"is_background":true,"is_streamed":true'}.items():
            file = tmp_path / "responses" / f"{name}.json"
            file.write_text(f'{{"owner":"ann","response":{response},"items":{items}{more}}}')
        known = "ann", "completed", False, False, RESPONSE, items.encode()
        assert await found(store, "resp_1", "ann") == known
        assert await found(store, "resp_2", "ann") == ("ann", "completed", True, True, RESPONSE, items.encode())
        (tmp_path / "responses" / "resp_1.json").write_text('{"owner":"ann","response":{')
        assert await store.find("resp_1", "ann") is None

    async def test_for_its_owner_alone_on_disk(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept())
        (file,) = (tmp_path / "responses").iterdir()
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


class TestPieces:
    """No reader has more of a response in memory than a piece."""

    async def test_of_a_large_one(self, tmp_path):
        store = opened(tmp_path, most_bytes=1 << 24)
        one = kept(3 * PIECE)
        await store.keep("resp_1", one)
        pieces = [piece async for piece in (await store.find("resp_1", "ann")).items.pieces()]
        assert b"".join(pieces) == await one.items.whole()
        assert max(map(len, pieces)) == PIECE

    async def test_who_reads_it_may_go_on_when_it_is_replaced_and_removed(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept(10))
        reading = await store.find("resp_1", "ann")
        await store.keep("resp_1", kept(20), replaces=True)
        await store.remove("resp_1")
        assert await read(reading) == await read(kept(10))

    async def test_one_that_became_shorter_meanwhile(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("resp_1", kept())
        reading = await store.find("resp_1", "ann")
        os.truncate(tmp_path / "responses" / "resp_1.json", 20)
        with pytest.raises(UnavailableError, match="shorter"):
            await reading.items.whole()


class TestBounds:
    async def test_the_oldest_go_by_count(self, tmp_path):
        store = opened(tmp_path, most=2)
        for name in ("a", "b", "c"):
            store.keep(name, kept())
        await store.flushed()
        assert await names(store, "a", "b", "c") == ["b", "c"]
        assert len([*(tmp_path / "responses").iterdir()]) == 2

    async def test_the_oldest_go_by_bytes(self, tmp_path):
        store = opened(tmp_path, most_bytes=2500)
        for name in ("a", "b", "c"):
            store.keep(name, kept(1000))
        await store.flushed()
        assert await names(store, "a", "b", "c") == ["b", "c"]

    async def test_one_that_is_too_large_pushes_nothing_out(self, tmp_path):
        store = opened(tmp_path, most_bytes=2500)
        await store.keep("a", kept())
        assert store.keep("b", kept(3000)) is None
        assert await names(store, "a", "b") == ["a"]

    async def test_a_slow_disk_keeps_no_more(self, tmp_path, monkeypatch):
        monkeypatch.setattr(response_store, "MOST_PENDING", 2500)
        store = opened(tmp_path)
        first = [store.keep(name, kept(1000)) for name in ("a", "b", "c")]
        assert first[2] is None
        await store.flushed()
        await asyncio.sleep(0)
        assert store.keep("c", kept(1000)) is not None

    async def test_the_old_are_gone(self, tmp_path):
        store = opened(tmp_path)
        await store.keep("a", kept())
        past = time.time() - 61
        os.utime(tmp_path / "responses" / "a.json", (past, past))
        assert await names(store, "a") == []
        again = opened(tmp_path)
        await again.flushed()
        assert not [*(tmp_path / "responses").iterdir()]

    async def test_smaller_bounds_hold_at_once(self, tmp_path):
        store = opened(tmp_path)
        for name in ("a", "b"):
            store.keep(name, kept())
        store.configure(most_bytes=1 << 20, most=1, keep_s=60.0)
        await store.flushed()
        assert await names(store, "a", "b") == ["b"]

    async def test_a_removed_one_is_gone_with_its_events(self, tmp_path):
        store = opened(tmp_path)
        store.logs["a"] = EventLog([b"data: 1\n\n", b"data: 2\n\n"])
        await store.keep("a", kept())
        del store.logs["a"]
        assert await (await store.events("a")).whole() == b"data: 1\n\ndata: 2\n\n"
        await store.remove("a")
        assert not [*(tmp_path / "responses").iterdir()]
        assert await (await store.events("a")).whole() == b""


class TestTrouble:
    async def test_a_folder_that_cannot_be_used(self, tmp_path):
        (tmp_path / "responses").write_text("a file")
        store = opened(tmp_path)
        assert not store.is_on
        assert store.keep("a", kept()) is None
        assert await store.find("a", "ann") is None

    async def test_a_disk_that_refuses(self, tmp_path):
        store = opened(tmp_path)
        (tmp_path / "responses").rename(tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError):
            await store.keep("a", kept())
        assert await store.find("a", "ann") is None

    def test_nothing_is_kept_where_it_is_off(self, tmp_path):
        assert not opened(tmp_path, most_bytes=0).is_on


class TestEventLog:
    async def test_who_waits_is_woken(self):
        log = EventLog()
        waiting = asyncio.create_task(log.changed(60.0))
        await asyncio.sleep(0)
        log.add(b"data: 1\n\n")
        assert await waiting
        assert not await log.changed(0.0)
