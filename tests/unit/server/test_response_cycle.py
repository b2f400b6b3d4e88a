"""How the end of a response is marked, for clients of both versions of HTTP."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.gateway.disconnect import ResponseBrokenError
from tests.support.wire import front, talk

PIECES = (b"one", b"two")


def request(version: bytes, method: bytes = b"GET") -> bytes:
    return method + b" / HTTP/" + version + b"\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"


async def in_pieces(_scope, _receive, send):
    """A response whose length nobody knows."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in PIECES:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def broken(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": PIECES[0], "more_body": True})
    await asyncio.sleep(0)
    raise ResponseBrokenError("The worker ended.")


class TestVersion10:
    """It knows no chunks: the connection's end is the response's."""

    async def test_no_chunks(self):
        async with front(in_pieces) as running:
            head, _, body = (await talk(running.port, request(b"1.0"))).partition(b"\r\n\r\n")
        assert body == b"".join(PIECES)
        assert b"transfer-encoding" not in head
        assert b"\r\nconnection: close" in head

    async def test_nothing_for_head(self):
        async with front(in_pieces) as running:
            assert (await talk(running.port, request(b"1.0", b"HEAD"))).endswith(b"\r\n\r\n")

    async def test_what_broke_off_never_looks_complete(self):
        async with front(broken) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(request(b"1.0"))
            with pytest.raises(ConnectionResetError):
                await reader.read(-1)
            writer.close()


class TestVersion11:
    """Chunks mark the end."""

    async def test_chunks(self):
        async with front(in_pieces) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(request(b"1.1"))
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
            writer.close()
