"""A worker that goes, at each point of an exchange. For a client that goes see test_promises.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.e2e.wire.conftest import Site, exchange
from tests.e2e.wire.test_as_it_is import CHUNKED, DONE, FINISH, JSON, PLAIN, STREAM, WHOLE, request, words
from tests.support.wire import SSE_HEAD, Answer, Conn, answers, chunk, ok

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
