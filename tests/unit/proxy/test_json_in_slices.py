"""A large answer of our own is sent as its client reads; of one that reads slowly nothing stays in memory."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.errors import UnavailableError
from supervisor.io import held_body
from supervisor.io.held_body import SLICE, BodyBudget
from supervisor.proxy.json_in_slices import JsonInSlices
from tests.support.limits import LIMIT_S

CONTENT = b'"%b"' % (bytes(range(65, 91)) * 200_000)


@pytest.fixture
def budget(tmp_path, monkeypatch):
    monkeypatch.setattr(held_body, "SPILL_AFTER_S", 0.01)
    made = BodyBudget()
    made.configure(limit=2 * len(CONTENT), disk_limit=2 * len(CONTENT), folder=tmp_path)
    yield made
    made.writer.shutdown()
    assert (made.used, made.disk_used) == (0, 0)


class Reader:
    """What a client has read; it stops after the first slice until it is told to go on."""

    def __init__(self, *, goes_on: bool) -> None:
        self.goes_on = asyncio.Event()
        self.messages: list[dict] = []
        if goes_on:
            self.goes_on.set()

    async def send(self, message: dict) -> None:
        self.messages.append(message)
        if len(self.messages) > 1:
            await self.goes_on.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


async def test_in_slices(budget):
    reader = Reader(goes_on=True)
    await JsonInSlices(CONTENT, budget)({}, None, reader.send)
    assert reader.body == CONTENT
    assert max(len(message["body"]) for message in reader.messages[1:]) <= 4 * SLICE
    assert (b"content-length", b"%d" % len(CONTENT)) in reader.messages[0]["headers"]
    assert [message["more_body"] for message in reader.messages[-2:]] == [True, False]


async def test_a_slow_reader_has_it_on_disk(budget):
    reader = Reader(goes_on=False)
    sending = asyncio.create_task(JsonInSlices(CONTENT, budget)({}, None, reader.send))
    async with asyncio.timeout(LIMIT_S):
        while not (budget.used == 0 and budget.disk_used == len(CONTENT)):
            await asyncio.sleep(0.01)
        reader.goes_on.set()
        await sending
    assert reader.body == CONTENT


async def test_a_client_that_leaves(budget):
    reader = Reader(goes_on=False)
    sending = asyncio.create_task(JsonInSlices(CONTENT, budget)({}, None, reader.send))
    while len(reader.messages) < 2:
        await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.wait([sending])


async def test_no_more_than_there_is_room_for(budget):
    budget.limit = len(CONTENT) - 1
    reader = Reader(goes_on=True)
    with pytest.raises(UnavailableError):
        await JsonInSlices(CONTENT, budget)({}, None, reader.send)
    assert reader.messages == []
