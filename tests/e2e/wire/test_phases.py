"""A worker that goes, and a client that goes, at each point of an exchange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.e2e.wire.conftest import Site, exchange
from tests.e2e.wire.test_as_it_is import CHUNKED, DONE, FINISH, JSON, PLAIN, STREAM, WHOLE, request, words
from tests.support.wire import PATIENCE_S, SSE_HEAD, Answer, Conn, answers, chunk, ok

EVENTS = [chunk(each) for each in (*words(3), FINISH, DONE)]

BROKEN = {
    "before it read": ([], False),
    "once it has read": ([], True),
    "in the first line": ([b"HTTP/1.1 20"], True),
    "in the head": ([b"HTTP/1.1 200 OK\r\nContent-Ty"], True),
    "after the head": ([ok(WHOLE, JSON)[: -len(WHOLE)]], True),
    "in the body": ([ok(WHOLE, JSON)[:-9]], True),
    "before the last byte": ([ok(WHOLE, JSON)[:-1]], True),
    "in a chunk": ([CHUNKED, chunk(WHOLE)[:-20]], True),
    "between chunks": ([CHUNKED, chunk(WHOLE[:20])], True),
    "before the last chunk": ([CHUNKED, chunk(WHOLE)], True),
    "in the last chunk": ([CHUNKED, chunk(WHOLE), b"0\r\n"], True),
}
BROKEN_STREAMS = {
    "after the head": [SSE_HEAD],
    "in an event": [SSE_HEAD, EVENTS[0], EVENTS[1][:-30]],
    "between events": [SSE_HEAD, *EVENTS[:2]],
    "before the finish": [SSE_HEAD, *EVENTS[:3]],
    "after events that end too soon": [SSE_HEAD, *EVENTS[:2], b"0\r\n\r\n"],
    "after an end too soon": [SSE_HEAD, *EVENTS[:2], EVENTS[-1], b"0\r\n\r\n"],
}


def broken(pieces: list[bytes], *, reads: bool = True, resets: bool):
    """Each connection ends after these bytes."""

    async def script(conn: Conn) -> None:
        if reads:
            await conn.request()
        await breaks_off(conn, pieces, resets=resets)

    return script


async def breaks_off(conn: Conn, pieces: list[bytes], *, resets: bool) -> None:
    for piece in pieces:
        await conn.send(piece)
    if pieces:
        await asyncio.sleep(0.05)  # a reset throws away what was not yet read
    if resets:
        conn.reset()


async def broken_streams(site: Site, ask: Callable[[str], bytes]) -> AsyncIterator[tuple[str, Answer]]:
    """What clients get of streams that end too soon: all at once, because each waits until it's clear that its worker lives.

    `ask`: the request whose body has this text.
    """
    cases = {f"{how} {phase}": (phase, how == "resets") for phase in BROKEN_STREAMS for how in ("closes", "resets")}

    async def script(conn: Conn) -> None:
        _, body = await conn.request()
        phase, resets = next(case for name, case in cases.items() if name.encode() in body)
        await breaks_off(conn, BROKEN_STREAMS[phase], resets=resets)

    async with site.scripted(script):
        told = await asyncio.gather(*(exchange(site.port, ask(name)) for name in cases))
    for name, data in zip(cases, told, strict=True):
        (answer,) = answers(data, "POST")
        yield name, answer
    await goes_on(site)


async def goes_on(site: Site) -> None:
    """The next request is answered."""

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            await conn.send(ok(WHOLE, JSON))

    async with site.scripted(script):
        (answer,) = answers(await exchange(site.port, request(PLAIN)), "POST")
    assert (answer.status, answer.body) == (200, WHOLE)


class TestTheWorkerGoes:
    """What isn't there whole never looks so, and the next request is answered."""

    @pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
    @pytest.mark.parametrize("name", BROKEN)
    async def test_whole(self, site, name, resets):
        pieces, reads = BROKEN[name]
        async with site.scripted(broken(pieces, reads=reads, resets=resets)):
            (answer,) = answers(await exchange(site.port, request(PLAIN)), "POST")
        assert answer.status in {502, 503} or not answer.whole
        await goes_on(site)

    async def test_streams(self, site):
        """The events that came, and then the error: nothing says that it is done."""
        async for name, answer in broken_streams(site, lambda text: request(STREAM.replace(b"user", text.encode()))):
            if answer.status == 200:
                *events, last = answer.body.decode().strip().split("\n\n")
                assert last.startswith('data: {"error":{'), name
                assert len(events) <= 3, name
            else:
                assert answer.status in {502, 503}, name
            assert b"[DONE]" not in answer.body, name


async def client_goes(site: Site, ask: bytes, phase: str, text: bytes, *, resets: bool) -> None:
    """`text`: the second word of a stream, as the client gets it."""
    reached, left = asyncio.Event(), asyncio.Event()
    said = {
        "first byte": [],
        "head": [SSE_HEAD],
        "stream": [SSE_HEAD, *EVENTS[:2]],
        "last piece": [SSE_HEAD, *EVENTS],
        "whole, before it": [],
        "whole, in it": [ok(WHOLE, JSON)[:-9]],
    }[phase]

    async def script(conn: Conn) -> None:
        await conn.request()
        for piece in said:
            await conn.send(piece)
        reached.set()
        await conn.closed()
        left.set()

    async with site.scripted(script), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(ask)
        await reached.wait()
        if phase in {"stream", "last piece"}:
            await reader.readuntil(text)
        if resets:
            writer.transport.abort()
        writer.close()
        await left.wait()
        await nothing_left(site)


class TestTheClientGoes:
    """Its worker's connection is closed, wherever the exchange was, and nothing of the request is left."""

    @pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
    @pytest.mark.parametrize(
        "phase", ["first byte", "head", "stream", "last piece", "whole, before it", "whole, in it"]
    )
    async def test_while(self, site, phase, resets):
        ask = request(PLAIN if phase.startswith("whole") else STREAM, close=False)
        await client_goes(site, ask, phase, b'"content":"1"', resets=resets)

    async def test_in_its_body(self, site):
        async def script(conn: Conn) -> None:
            await conn.request()
            raise AssertionError("half a request reached the worker")

        async with site.scripted(script):
            await asyncio.to_thread(lambda: site.daemon.post("/v1/admin/models/m/load").raise_for_status())
            _, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(request(PLAIN)[:-9])
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await nothing_left(site)

    async def test_in_the_queue(self, site):
        """Who waited behind it comes next, and the worker never sees it."""
        seen, go = [], asyncio.Event()

        async def script(conn: Conn) -> None:
            while True:
                seen.append((await conn.request())[1])
                await go.wait()
                await conn.send(ok(WHOLE, JSON))

        def waits(count: int) -> bool:
            return site.daemon.model("one")["queued"] == count

        async with site.scripted(script), asyncio.timeout(PATIENCE_S):
            asks = [
                request(PLAIN.replace(b'"m"', b'"one"').replace(b"user", who)) for who in (b"first", b"gone", b"next")
            ]
            first = asyncio.create_task(exchange(site.port, asks[0]))
            while not seen:
                await asyncio.sleep(0.01)
            _, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(asks[1])
            while not await asyncio.to_thread(waits, 1):
                await asyncio.sleep(0.01)
            after = asyncio.create_task(exchange(site.port, asks[2]))
            while not await asyncio.to_thread(waits, 2):
                await asyncio.sleep(0.01)
            writer.close()
            while not await asyncio.to_thread(waits, 1):
                await asyncio.sleep(0.01)
            go.set()
            for answer in (await first, await after):
                assert answers(answer, "POST")[0].status == 200
        assert [b"first" in seen[0], b"next" in seen[1], len(seen)] == [True, True, 2]


async def nothing_left(site) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(lambda: site.daemon.get("/v1/admin/requests").json()["data"]):
            await asyncio.sleep(0.01)
