"""Thousands of connections that end at once are heard of a few in a turn: each watched one once, no other."""

from __future__ import annotations

import asyncio
import select
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.gateway.disconnect import CancelOnDisconnect, Disconnect
from supervisor.server import hang_ups
from supervisor.server.hang_ups import HANG_UPS, MOST_IN_A_TURN, Crowd, HangUps
from supervisor.server.protocol import GuardedProtocol
from supervisor.server.response_cycle import ResponseCycle
from tests.support.garbage import no_cycles_of
from tests.support.wire import front

COUNT = 3 * MOST_IN_A_TURN
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=COUNT))
def test_who_has_gone_is_told_once(each):
    """Of any connections: those that end, and whose end is still wanted then."""
    called, turns = [], []
    expected = [at for at, (ends, is_forgotten) in enumerate(each) if ends and not is_forgotten]

    async def main() -> None:
        watched, pairs = HangUps(), [socket.socketpair() for _ in each]
        watched.open()
        for at, (ours, _) in enumerate(pairs):
            watched.watch(ours.fileno(), select.EPOLLRDHUP, lambda at=at: called.append(at))
        for (ours, _), (_, is_forgotten) in zip(pairs, each, strict=True):
            if is_forgotten:
                watched.forget(ours.fileno())
        for (_, theirs), (ends, _) in zip(pairs, each, strict=True):
            if ends:
                theirs.close()
        while len(called) < len(expected):
            turns.append(len(called))
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        for (ours, theirs), (_, is_forgotten) in zip(pairs, each, strict=True):
            if not is_forgotten:
                watched.forget(ours.fileno())
            ours.close()
            theirs.close()

    asyncio.run(main())
    assert sorted(called) == expected
    assert all(after - before <= MOST_IN_A_TURN for before, after in pairwise(turns))


@pytest.fixture
async def waiting(monkeypatch):
    """A server whose requests wait for long; the sockets of many that do; the ends it has read, by turn of the loop."""
    ends, turn = [], 0
    ended = GuardedProtocol.eof_received

    def counted(connection):
        ends.append(turn)
        return ended(connection)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def app(scope, receive, send):
        await receive()
        with CancelOnDisconnect(scope) as client:
            client.wait_long()
            if scope["path"] != "/short":
                await asyncio.Event().wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"x"})

    monkeypatch.setattr(GuardedProtocol, "eof_received", counted)
    async with front(app) as running:
        sockets = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(COUNT)]
        for each in sockets:
            each.sendall(REQUEST)
        await until(lambda: len(HANG_UPS._calls) == COUNT)
        counting = asyncio.create_task(count())
        yield running, sockets, ends
        counting.cancel()
        for each in sockets:
            each.close()
    assert not HANG_UPS._calls


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


async def test_many_that_wait_leave_at_once(waiting):
    running, sockets, ends = waiting
    for each in sockets:
        each.close()
    await until(lambda: not running.state.connections and not running.state.tasks)
    assert len(ends) == COUNT
    assert max(map(ends.count, ends)) <= MOST_IN_A_TURN


async def test_many_that_wait_are_reset_at_once(waiting):
    running, sockets, ends = waiting
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        each.close()
    await until(lambda: not running.state.connections and not running.state.tasks)
    assert ends == []


async def test_one_that_has_waited_is_read_again(waiting):
    """Its next request lay in the kernel meanwhile."""
    running, _, _ = waiting
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    for _ in range(2):
        writer.write(REQUEST.replace(b"/ ", b"/short ", 1) * 2)
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await until(lambda: len(HANG_UPS._calls) == COUNT)


async def test_one_that_half_closes_waits_on(waiting, monkeypatch):
    """It is probed once, and told apart from one that has left."""
    running, sockets, ends = waiting
    monkeypatch.setattr(hang_ups, "PROBE_EVERY_S", 0.05)
    sockets[0].shutdown(socket.SHUT_WR)
    await until(lambda: ends)
    sockets[0].setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(sockets[0], 100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert len(running.state.connections) == COUNT
    sockets[0].close()
    await until(lambda: len(running.state.connections) < COUNT)


@pytest.mark.parametrize("count", [1, COUNT])
async def test_one_that_waits_again_and_half_closes_gets_its_answer(count):
    """As one that another daemon answers, which has taken over meanwhile."""
    is_time = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        with CancelOnDisconnect(scope) as client:
            client.wait_long()
            await asyncio.sleep(0)
        with CancelOnDisconnect(scope):
            await is_time.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"x"})

    async with front(app) as running:
        streams = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(count)]
        for _, writer in streams:
            writer.write(REQUEST)
        await until(lambda: len(running.state.tasks) == count)
        for _, writer in streams:
            writer.write_eof()
        await until(lambda: all(each._half_closed for each in running.state.connections))
        is_time.set()
        for reader, writer in streams:
            assert (await reader.read()).endswith(b"\r\n\r\nx")
            writer.close()
    assert not HANG_UPS._calls


@pytest.mark.parametrize("path", [b"/short", b"/long", b"/half"], ids=["answered", "left while it waited", "not sent"])
async def test_a_connection_leaves_no_reference_cycle(path):
    """The collector looks seldom: thousands of them would stay for long."""

    async def app(scope, receive, send):
        await receive()
        with CancelOnDisconnect(scope) as client:
            client.wait_long()
            if scope["path"] == "/long":
                await asyncio.Event().wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"x"})

    async def leave(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"/ ", path + b" ", 1) if path != b"/half" else REQUEST[:9])
        if path == b"/short":
            await reader.readuntil(b"\r\n\r\nx")
        elif path == b"/long":
            await until(lambda: HANG_UPS._calls)
        writer.close()
        await until(lambda: not running.state.connections and not running.state.tasks)

    async with front(app) as running:
        await leave(running.port)
        with no_cycles_of(GuardedProtocol, Disconnect, ResponseCycle):
            for _ in range(COUNT):
                await leave(running.port)


class TestCrowd:
    """Makes many calls: a few in each turn of the loop, all of them, in their order."""

    async def test_a_few_in_each_turn(self):
        crowd, called, turns = Crowd(most=3), [], []
        for number in range(10):
            crowd.call(lambda number=number: called.append(number))
        while len(called) < 10:
            turns.append(len(called))
            await asyncio.sleep(0)
        assert called == list(range(10))
        assert turns == [3, 6, 9]

    async def test_one_that_comes_alone_is_called_at_once(self):
        crowd, called = Crowd(most=1), []
        for number in range(3):
            crowd.call(lambda number=number: called.append(number))
            assert called[-1] == number
            for _ in range(2):
                await asyncio.sleep(0)

    def test_another_loop_begins_anew(self):
        crowd, called = Crowd(most=1), []

        async def leave() -> None:
            crowd.call(lambda: called.append(1))
            crowd.call(lambda: called.append(2))

        for _ in range(2):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(leave())
            loop.close()
        assert called.count(1) == 2
