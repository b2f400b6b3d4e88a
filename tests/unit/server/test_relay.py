"""A request that the successor answers is passed on as it may be sent in HTTP/1.1."""

from __future__ import annotations

import pytest

from supervisor.dialects.openai import OPENAI
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.upstream import UpstreamPool
from supervisor.server.relay import relay
from tests.support.wire import front, ok, talk, worker


@pytest.mark.parametrize(("fields", "host"), [(b"Host: a\r\n", b"a"), (b"", b"localhost")])
async def test_there_is_always_a_host(fields, host):
    """A client of HTTP/1.0 may leave it out."""
    heads = []

    async def successor(conn):
        heads.append((await conn.request())[0])
        await conn.send(ok(b"hi"))

    async with worker(successor) as behind:
        pool = UpstreamPool("127.0.0.1", behind.port, names_host=False)

        async def app(scope, _receive, send):
            await relay(scope, send, RequestBuffer(data=b""), pool, b"id", OPENAI, is_started=False)

        async with front(app) as running:
            assert (await talk(running.port, b"GET /health HTTP/1.0\r\n" + fields + b"\r\n")).endswith(b"hi")
        pool.close()
    assert [line for line in heads[0].lower().split(b"\r\n") if line.startswith(b"host:")] == [b"host: " + host]
