"""The server protocol's guards, from raw bytes. About 2 s."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from supervisor.dialects.openai import OPENAI
from supervisor.errors import LlmuxError
from supervisor.gateway.body.body import read_body
from supervisor.gateway.error_response import error_body
from supervisor.server import protocol
from supervisor.server.protocol import TUNNEL_SILENT_S, GuardedProtocol, TunnelledClient
from tests.support.cases import cases
from tests.support.wire import PATIENCE_S, front, post, talk, until


async def echo(scope, receive, send):
    """Answers with the request's body, or with what is wrong with it."""
    status = 200
    try:
        body = await read_body(scope, receive, 1 << 20)
    except LlmuxError as error:
        status, body = error.status, error_body(error, OPENAI)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


class TestRefusals:
    """What can be read in two ways, or is too large, gets our envelope and a closed connection."""

    @cases(
        ("request_bytes", "status"),
        [
            (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", 400),
            (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400),
            (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
            (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
            (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", 400),
            (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400),
            (b"PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            (b"NONSENSE / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
            (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000, 431),
            (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
            (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", 431),
        ],
    )
    async def test_refused(self, request_bytes, status):
        reached = []

        async def app(scope, receive, send):
            reached.append(scope)

        async with front(app) as running:
            answer = await talk(running.port, request_bytes)
            if answer or status != 431:  # what was left unread may have made the kernel drop our answer
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 %d " % status)
                assert b"\r\nconnection: close" in head
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert not reached

    async def test_no_refusal_lands_in_another_answer(self):
        started = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            started.set()
            await asyncio.Event().wait()

        async with front(app) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(post(close=False))
            await started.wait()
            writer.write(b"garbage\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"HTTP/1.1 400" not in await reader.read(-1)
            writer.close()
            for task in list(running.state.tasks):
                task.cancel()


class TestDeadlines:
    """Slow heads and stalled bodies end; idle keep-alive connections and busy ones don't."""

    async def test_head(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "head_s", 0.2)
        async with front(echo) as running:
            for sent in (b"", b"GET / HTTP/1.1\r\nHo"):
                assert (await talk(running.port, sent)).startswith(b"HTTP/1.1 408 ")

    async def test_a_trickle_does_not_extend_the_head(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "head_s", 0.3)
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(b"GET / HTTP/1.1\r\n")
            reading = asyncio.create_task(reader.read(-1))
            while not reading.done():
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.02)
            assert (await reading).startswith(b"HTTP/1.1 408 ")
            writer.close()

    async def test_stalled_body(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "body_window_s", 0.2)
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(post(b"whole", close=False))
            assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200")
            writer.write(post(b"x" * 10)[:-5])
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 408 ")
            writer.close()
            await until(lambda: not running.state.tasks)

    async def test_keep_alive_connection_has_no_head_deadline_while_busy_or_idle(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "head_s", 0.5)

        async def slow(scope, receive, send):
            await asyncio.sleep(0.8)
            await echo(scope, receive, send)

        async with front(slow) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            for _ in range(2):
                writer.write(post(b"12345", close=False))
                assert (await reader.readuntil(b"12345")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.8)
            writer.close()

    async def test_slowloris(self):
        """200 connections that never finish their head, and an ordinary request (fault 28)."""
        async with front(echo) as running:
            slow = []
            for _ in range(200):
                _, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nX-")
                slow.append(writer)
            assert (await talk(running.port, GET)).startswith(b"HTTP/1.1 200")
            for writer in slow:
                writer.close()
            await until(lambda: not running.state.connections)

    async def test_a_body_that_comes_too_slowly(self, monkeypatch):
        """It trickles, so it never stalls; a fast one of the same connection is served."""
        monkeypatch.setattr(GuardedProtocol, "body_window_s", 0.3)
        monkeypatch.setattr(GuardedProtocol, "least_bytes_per_s", 1000.0)
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(post(b"whole", close=False))
            assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200")
            writer.write(post(b"x" * 1000)[:-1000])
            reading = asyncio.create_task(reader.read(-1))
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
            answer = await reading
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
            writer.close()

    async def test_a_body_that_takes_too_long(self, monkeypatch):
        """Fast enough in each window, and too long in all."""
        monkeypatch.setattr(GuardedProtocol, "head_s", 600.0)  # its timer ends with the head
        monkeypatch.setattr(GuardedProtocol, "body_window_s", 0.1)
        monkeypatch.setattr(GuardedProtocol, "body_s", 0.5)
        monkeypatch.setattr(GuardedProtocol, "least_bytes_per_s", 0.0)
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(post(b"x" * 100_000)[:-100_000])
            reading = asyncio.create_task(reader.read(-1))
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.005)
            assert b"limits.body_s" in await reading
            writer.close()


class TestMalformedChunks:
    """A request whose chunks are malformed gets 400 in our shape, whoever waits for its body."""

    CHUNKS = (b"zz\r\n", b"5\r\nhello there", b"-1\r\n", b"5;\x00\r\nhello\r\n", b"fffffffffffffffff\r\n")
    HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    @cases("chunks", CHUNKS)
    @cases("late", [False, True], ids=["at once", "while the application waits"])
    async def test_get_400(self, chunks, late):
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(self.HEAD + b"3\r\nabc\r\n")
            if late:
                await until(lambda: bool(running.state.tasks))
            writer.write(chunks + b"more" * 1000)
            answer = await reader.read(-1)
            assert answer.startswith(b"HTTP/1.1 400 "), answer
            assert b"\r\nconnection: close" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
            writer.close()

    async def test_after_a_response_began_the_connection_is_cut(self):
        async def early(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            with contextlib.suppress(LlmuxError):
                await read_body(scope, receive, 1 << 20)

        async with front(early) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(self.HEAD)
            await reader.readuntil(b"first")
            writer.write(b"zz\r\n")
            with contextlib.suppress(ConnectionError):
                assert not (await reader.read(-1)).endswith(b"0\r\n\r\n")
            writer.close()


class TestManyConnections:
    """An address has a limited number of connections; whoever has too many is told so."""

    async def test_one_too_many(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "most_connections", 3)
        async with front(echo) as running:
            open_ones = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(3)]
            await until(lambda: len(running.state.connections) == 3)
            answer = await talk(running.port, GET)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"\r\nretry-after: " in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            open_ones.pop()[1].close()
            await until(lambda: len(running.state.connections) == 2)
            assert (await talk(running.port, GET)).startswith(b"HTTP/1.1 200 ")
            for _, writer in open_ones:
                writer.close()
            await until(lambda: not running.state.connections)
            assert not protocol._connections


class TestOrdinary:
    """What must go on working."""

    async def test_keep_alive_and_pipelining(self):
        async with front(echo) as running:
            answer = await talk(running.port, post(b"one", close=False) * 3 + post(b"two"))
            assert answer.count(b"HTTP/1.1 200") == 4
            assert answer.endswith(b"two")

    async def test_flood_of_pipelined_requests(self):
        async def stuck(scope, receive, send):
            await asyncio.sleep(60)

        async with front(stuck) as running:
            assert await talk(running.port, GET.replace(b"Connection: close\r\n", b"") * 100) == b""
            for task in list(running.state.tasks):
                task.cancel()

    async def test_chunked_body_byte_by_byte(self):
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            request = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            for byte in request:
                writer.write(bytes((byte,)))
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.read(-1)).endswith(b"abc")
            writer.close()

    @pytest.mark.parametrize("cut", [1, 60, 10_000])
    async def test_h2c_offer_is_declined_and_the_body_survives(self, cut):
        """Java's HttpClient offers h2c with each request; llhttp would drop the body."""
        request = post(
            b"body", b"Upgrade: h2c", b"HTTP2-Settings: AAM", b"Connection: Upgrade, HTTP2-Settings", close=False
        )
        async with front(echo) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            for _ in range(2):
                for start in range(0, len(request), cut):
                    writer.write(request[start : start + cut])
                    await writer.drain()
                    await asyncio.sleep(0)
                answer = await reader.readuntil(b"body")
                assert answer.startswith(b"HTTP/1.1 200")
            writer.close()

    async def test_failing_application(self):
        async def app(scope, receive, send):
            if scope["path"] == "/late":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ZeroDivisionError

        async with front(app) as running:
            early = await talk(running.port, GET)
            assert early.startswith(b"HTTP/1.1 500")
            assert json.loads(early.partition(b"\r\n\r\n")[2])["error"]["code"] == "internal_error"
            late = await talk(running.port, b"GET /late HTTP/1.1\r\nHost: a\r\n\r\n")
            assert late.endswith(b"half\r\n")

    async def test_silent_application(self):
        async def app(scope, receive, send):
            pass

        async with front(app) as running:
            assert (await talk(running.port, GET)).startswith(b"HTTP/1.1 500")


class Clock:
    """A loop's time, and nothing else of it."""

    def __init__(self):
        self.now = 0.0
        self.get_debug = asyncio.get_running_loop().get_debug

    def time(self):
        return self.now


async def test_a_websocket_through_which_nothing_passes():
    """Its client counts as one that has stopped reading."""
    clock = Clock()
    client = TunnelledClient(clock, asyncio.Transport())
    clock.now = TUNNEL_SILENT_S - 1
    assert not client.is_silent()
    client.feed(b"x")
    clock.now += TUNNEL_SILENT_S - 1
    assert not client.is_silent()
    clock.now += 1
    assert client.is_silent()
    assert await client.received.read(9) == b"x"
