"""What the server knows of a client that holds its answer up: how far it has read, from the kernel."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.gateway.disconnect import EXTENSION
from tests.support.wire import front, post, until

PIECE = b"x" * 65536


@pytest.fixture
async def served():
    """A server that sends without end: its port, and what it knows of the last client."""
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await asyncio.sleep(0)

    async with front(app) as server:
        yield server.port, lambda: scopes[-1]["extensions"][EXTENSION].read_while_blocked() if scopes else None


async def test_counts_what_it_reads(served):
    port, known = served
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**14)
    assert known() is None
    writer.write(post())
    await until(lambda: known() is not None)
    read = 0
    settled = known()
    for _ in range(20):
        while read < settled + len(PIECE):
            read += len(await reader.readexactly(len(PIECE)))
        await until(lambda: (known() or 0) > settled)
        settled = known() or settled
    writer.close()


async def test_nothing_of_one_that_is_gone(served):
    port, known = served
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**14)
    writer.write(post())
    await until(lambda: known() is not None)
    writer.transport.abort()
    await until(lambda: known() is None)
