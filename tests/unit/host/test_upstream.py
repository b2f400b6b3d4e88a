"""The pooled client on the wire: connections that it reuses or refuses, and no request sent twice. About 4 s."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from supervisor.errors import UpstreamError, UpstreamTimeoutError
from supervisor.host.upstream.upstream import Connection, UpstreamPool, idle_limit_s
from tests.support.cases import cases
from tests.support.garbage import no_cycles_of
from tests.support.wire import PATIENCE_S, Conn, answering, chunk, ok, open_fds, pool, until, worker

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%s\r\n2\r\nhi\r\n0\r\n\r\n"


async def get(upstream: UpstreamPool, method: str = "GET", **options) -> tuple[int, bytes]:
    response = await upstream.request(method, b"/x", [], **options)
    try:
        return response.status, await response.read(1 << 30)
    finally:
        response.close()


class TestReuse:
    """A connection is used again only when that is certain to be safe."""

    async def test_keep_alive(self):
        async with worker(answering(ok(b"hi"))) as behind, pool(behind.port) as upstream:
            for _ in range(3):
                assert await get(upstream) == (200, b"hi")
            assert behind.accepted == 1

    @cases(
        "response",
        [
            ok(b"hi", b"Connection: close"),
            b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
            ok(b"hi") + b"stray",
            ok(b"hi") + b"\r\nHTTP/1.1 200 OK\r\nContent-Le",
            ok(b"hi", b"Keep-Alive: timeout=1"),
            STREAM % b"Keep-Alive: timeout=60, max=100\r\n",
        ],
        ids=["close", "http/1.0", "stray bytes", "half a second answer", "timeout too short", "cpp-httplib's stream"],
    )
    async def test_not_reused(self, response):
        async with worker(answering(response)) as behind, pool(behind.port) as upstream:
            assert await get(upstream) == (200, b"hi")
            assert await get(upstream) == (200, b"hi")
            assert behind.accepted == 2

    async def test_closed_ones_leave_no_reference_cycle(self):
        async with worker(answering(ok(b"hi", b"Connection: close"))) as behind, pool(behind.port) as upstream:
            assert await get(upstream) == (200, b"hi")
            with no_cycles_of(Connection):
                for _ in range(3):
                    assert await get(upstream) == (200, b"hi")
                await until(lambda: not upstream.open_connections)

    async def test_reused_after_a_stream_of_any_other_server(self):
        async with worker(answering(STREAM % b"")) as behind, pool(behind.port) as upstream:
            for _ in range(3):
                assert await get(upstream) == (200, b"hi")
            assert behind.accepted == 1

    async def test_closed_while_the_next_request_is_on_its_way(self):
        """llama.cpp closes after every stream despite its Keep-Alive; the client must not notice."""

        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(STREAM % b"Keep-Alive: timeout=5, max=100\r\n")
            await conn.reader.read(1)  # the next request, if it comes here, or that we closed it
            conn.reset()

        async with worker(script) as behind, pool(behind.port) as upstream:
            for turn in range(20):
                assert await get(upstream, "POST", body=b"{}") == (200, b"hi")
                assert behind.accepted == turn + 1

    async def test_a_worker_that_loses_a_request_on_a_kept_connection_is_asked_on_new_ones(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(ok(b"hi"))
            await conn.request()  # it doesn't know yet that the connection is closed here

        async with worker(script) as behind, pool(behind.port) as upstream:
            assert await get(upstream) == (200, b"hi")
            with pytest.raises(UpstreamError, match="without an answer"):
                await get(upstream, "POST", body=b"{}")
            for _ in range(3):
                assert await get(upstream, "POST", body=b"{}") == (200, b"hi")
            assert behind.accepted == 4

    @pytest.mark.parametrize(("promised", "kept"), [(1, 0), (2, 1), (5, 2.5), (60, 30)])
    async def test_kept_for_less_than_promised(self, promised, kept):
        """The worker began to count before its answer was read here, on a busy machine well before."""
        assert idle_limit_s(promised) == kept

    async def test_idle_connections_expire_and_keep_alive_timeout_is_honoured(self):
        async with worker(answering(ok(b"hi", b"Keep-Alive: timeout=60"))) as patient, pool(patient.port) as upstream:
            upstream.idle_s = 0.1
            await get(upstream)
            await asyncio.sleep(0.5)
            await get(upstream)
            assert patient.accepted == 1
        async with worker(answering(ok(b"hi"))) as behind, pool(behind.port, idle_s=0.1) as upstream:
            await get(upstream)
            await until(lambda: upstream.open_connections == 0)
            await until(lambda: behind.active == 0)

    async def test_a_connection_closed_while_idle_is_noticed_before_a_byte_is_written(self):
        """Each worker connection serves one request and then closes without saying so (fault 15)."""
        async with worker(answering(ok(b"hi"), times=1)) as behind, pool(behind.port) as upstream:
            for turn in range(20):
                assert await get(upstream) == (200, b"hi")
                await until(lambda: behind.active == 0)  # closed there; our loop has not looked yet
                assert behind.accepted == turn + 1

    async def test_unread_body_closes(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"one"))
            await conn.closed()

        async with worker(script) as behind, pool(behind.port) as upstream:
            response = await upstream.request("GET", b"/", [])
            assert await response.next_chunk() == b"one"
            response.close()
            await until(lambda: behind.active == 0)
            with pytest.raises(UpstreamError):
                await response.next_chunk()

    async def test_paused_connection_is_reusable(self):
        """The read that completes an answer may also be the one that pauses reading."""
        big = bytes(400_000)
        async with worker(answering(ok(big))) as behind, pool(behind.port) as upstream:
            for _ in range(4):
                assert await get(upstream) == (200, big)
            assert behind.accepted == 1


class TestRequest:
    """The bytes that the worker gets."""

    async def test_wire_format(self):
        seen = []

        async def script(conn: Conn) -> None:
            seen.append(await conn.request())
            await conn.send(ok(b""))

        async with worker(script) as behind, pool(behind.port, auth="Bearer k") as upstream:
            response = await upstream.request("POST", b"/a?b=%20", [(b"x-one", b"1"), (b"x-one", b"2")], b"body")
            response.close()
            head = b"POST /a?b=%%20 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer k\r\n" % behind.port
            assert seen == [(head + b"x-one: 1\r\nx-one: 2\r\ncontent-length: 4\r\n\r\n", b"body")]

    async def test_body_of_unknown_length(self):
        seen = []

        async def script(conn: Conn) -> None:
            seen.append((await conn.request())[1])
            await conn.send(ok(b"done"))

        async def source():
            for piece in (b"a" * 100_000, b"", b"b"):
                yield piece
                await asyncio.sleep(0)

        async with worker(script) as behind, pool(behind.port) as upstream:
            assert await get(upstream, "POST", body=source()) == (200, b"done")
            assert seen == [b"a" * 100_000 + b"b"]

    @pytest.mark.parametrize("kind", [bytes, bytearray])
    async def test_large_body(self, kind):
        """It is written in slices, which arrive as one body of a known length, and the connection is kept."""
        body = random.Random(1).randbytes(5_000_001)
        seen = []

        async def script(conn: Conn) -> None:
            while True:
                seen.append(await conn.request())
                await conn.send(ok(b"done"))

        async with worker(script) as behind, pool(behind.port) as upstream:
            for _ in range(2):
                assert await get(upstream, "POST", body=kind(body)) == (200, b"done")
            for head, arrived in seen:
                assert arrived == body
                assert b"content-length: 5000001\r\n" in head
            assert (len(seen), behind.accepted) == (2, 1)

    async def test_early_answer_to_a_large_body(self):
        """The rest is never sent, so the connection can't be used again."""

        async def script(conn: Conn) -> None:
            await conn.reader.readuntil(b"\r\n\r\n")
            await conn.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await conn.closed()

        async with worker(script) as behind, pool(behind.port) as upstream:
            assert await get(upstream, "POST", body=bytes(50_000_000)) == (413, b"big")
            await until(lambda: behind.active == 0 and upstream.open_connections == 0)

    async def test_body_source_that_fails(self):
        async def source():
            yield b"a"
            raise KeyError("gone")

        async with worker(answering(ok(b"never"))) as behind, pool(behind.port) as upstream:
            with pytest.raises(KeyError):
                await upstream.request("POST", b"/", [], source())
            await until(lambda: behind.active == 0)

    async def test_early_answer_to_an_endless_body(self):
        async def script(conn: Conn) -> None:
            await conn.reader.readuntil(b"\r\n\r\n")
            await conn.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await conn.closed()

        async def source():
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0.001)

        async with worker(script) as behind, pool(behind.port) as upstream:
            assert await get(upstream, "POST", body=source()) == (413, b"big")
            await until(lambda: behind.active == 0 and upstream.open_connections == 0)


class TestAnswer:
    """Complete answers, and incomplete ones that look complete."""

    @cases(
        ("method", "wire", "expected"),
        [
            ("GET", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + ok(b"hi"), (200, b"hi")),
            ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", (200, b"")),
            ("GET", b"HTTP/1.1 204 No\r\n\r\n", (204, b"")),
            ("GET", b"HTTP/1.1 304 Same\r\nContent-Length: 5\r\n\r\n", (304, b"")),
            (
                "GET",
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\nT: x\r\n\r\n",
                (200, b"a"),
            ),
            ("GET", b"HTTP/1.1 599 Own\r\nContent-Length: 0\r\n\r\n", (599, b"")),
        ],
        ids=["1xx", "HEAD", "204", "304", "trailers", "unknown status"],
    )
    @cases("bytewise", [False, True])
    async def test_complete(self, method, wire, expected, bytewise):
        async def script(conn: Conn) -> None:
            await conn.request()
            for byte in wire if bytewise else ():
                await conn.send(bytes((byte,)))
                await asyncio.sleep(0)
            if not bytewise:
                await conn.send(wire)
            await conn.closed()

        async with worker(script) as behind, pool(behind.port) as upstream:
            async with asyncio.timeout(PATIENCE_S):
                assert await get(upstream, method) == expected

    async def test_headers_are_end_to_end_and_keep_duplicates(self):
        wire = ok(b"", b"X-A: 1", b"x-a: 2", b"Keep-Alive: timeout=9", b"Connection: keep-alive, X-Hop", b"X-Hop: 1")
        async with worker(answering(wire)) as behind, pool(behind.port) as upstream:
            response = await upstream.request("GET", b"/", [])
            assert response.headers == [(b"content-length", b"0"), (b"x-a", b"1"), (b"x-a", b"2")]

    async def test_body_without_length_ends_with_the_connection(self):
        async with (
            worker(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it", times=1)) as behind,
            pool(behind.port) as upstream,
        ):
            assert await get(upstream) == (200, b"all of it")

    @pytest.mark.parametrize(
        "wire",
        [
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nZ\r\n",
        ],
        ids=["short", "no last chunk", "unfinished last chunk", "bad chunk"],
    )
    async def test_truncated(self, wire):
        async with worker(answering(wire, times=1)) as behind, pool(behind.port) as upstream:
            response = await upstream.request("GET", b"/", [])
            assert await response.next_chunk() == b"half"
            with pytest.raises(UpstreamError):
                await response.next_chunk()

    async def test_reset_in_a_body_without_length_is_no_end(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
            await asyncio.sleep(0.05)
            conn.reset()

        async with worker(script) as behind, pool(behind.port) as upstream:
            with pytest.raises(UpstreamError):
                await get(upstream)

    @cases(
        "wire",
        [
            b"",
            b"SSH-2.0-OpenSSH_9\r\n",
            b"HTTP/1.1 200",
            b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
        ],
        ids=["nothing", "ssh", "half a head", "upgrade", "gzip", "both framings", "endless header"],
    )
    async def test_no_answer(self, wire):
        requests = []

        async def script(conn: Conn) -> None:
            requests.append(await conn.request())
            await conn.send(wire)

        async with worker(script) as behind, pool(behind.port) as upstream:
            with pytest.raises(UpstreamError):
                await get(upstream, "POST", body=b"once")
            assert len(requests) == 1, "a request that was written is never written again"


class TestDeadlines:
    """A silent request ends; one that makes progress doesn't."""

    async def test_first_byte(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.closed()

        async with worker(script) as behind, pool(behind.port) as upstream:
            with pytest.raises(UpstreamTimeoutError):
                await get(upstream, first_byte_s=0.1)
            await until(lambda: behind.active == 0)

    async def test_progress_is_no_silence(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.closed()

        async with worker(script) as behind, pool(behind.port) as upstream:
            asking = asyncio.create_task(get(upstream, first_byte_s=1000))
            await until(lambda: behind.active == 1)
            (connection,) = upstream._connections
            upstream.note_progress()
            upstream.worked_at += 900
            connection.check(upstream.worked_at + 999)
            assert not asking.done()
            connection.check(upstream.worked_at + 1001)
            with pytest.raises(UpstreamTimeoutError):
                await asking

    async def test_stream_idle(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(8):
                await asyncio.sleep(0.1)
                await conn.send(chunk(b"x"))
            await conn.closed()

        async with worker(script) as behind, pool(behind.port, stream_idle_s=0.6) as upstream:
            response = await upstream.request("GET", b"/", [])
            with pytest.raises(UpstreamTimeoutError):
                await response.read(1 << 30)
            await until(lambda: behind.active == 0)

    async def test_refused_and_blackhole(self):
        upstream = UpstreamPool("127.0.0.1", 9)
        with pytest.raises(UpstreamError):
            await get(upstream)


class TestBackpressure:
    """A consumer that doesn't read holds the worker back."""

    async def test_bounded(self):
        sent = 0

        async def script(conn: Conn) -> None:
            nonlocal sent
            await conn.request()
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
            block = bytes(100_000)
            for _ in range(1000):
                await conn.send(block)
                sent += len(block)

        async with worker(script) as behind, pool(behind.port) as upstream:
            response = await upstream.request("GET", b"/", [])
            last = -1
            while sent != last:
                last = sent
                await asyncio.sleep(0.1)
            assert sent < 50_000_000, "the kernel's buffers are all that may fill up beyond ours"
            assert len(await response.next_chunk()) <= 1_048_576
            await response.next_chunk()
            await until(lambda: sent > last)
            response.close()


class TestCancellation:
    """Cancelling the caller at any moment leaves no connection open."""

    async def test_no_leaks(self):
        async def script(conn: Conn) -> None:
            while True:
                await conn.request()
                await asyncio.sleep(0.002)
                await conn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(3):
                    await asyncio.sleep(0.002)
                    await conn.send(chunk(b"x"))
                await conn.send(b"0\r\n\r\n")

        dice = random.Random(7)
        async with worker(script) as behind:
            await asyncio.sleep(0)
            before = open_fds()
            upstream = UpstreamPool("127.0.0.1", behind.port)
            began = time.monotonic()
            for _ in range(200):
                task = asyncio.create_task(get(upstream))
                if dice.random() < 0.3:
                    upstream.close()  # so that connecting gets cancelled as well
                    upstream = UpstreamPool("127.0.0.1", behind.port)
                await asyncio.sleep(dice.random() * 0.012)
                task.cancel()
                await asyncio.wait((task,))
            upstream.close()
            assert time.monotonic() - began < 60
            await until(lambda: behind.active == 0 and open_fds() <= before)
