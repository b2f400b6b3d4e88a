from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.host.process.progress import Progress
from supervisor.host.upstream.probe import (
    BODY_LIMIT,
    MIB,
    Liveness,
    ProbeResult,
    Readiness,
    StartupPatience,
    check_health,
    check_inference,
    check_ready,
    startup_delay_s,
)
from supervisor.host.upstream.upstream import Connection
from tests.support.limits import LIMIT_S

OK = ProbeResult(True, 200, "HTTP 200")
BAD = ProbeResult(False, None, "no answer")
OURS = ProbeResult(False, None, "Too many open files", inconclusive=True)


@contextlib.asynccontextmanager
async def serving(answer):
    """A server on loopback that gives every request to `answer(head, writer)`; yields its address."""

    exchanges = set()

    async def connected(reader, writer):
        exchanges.add(asyncio.current_task())
        try:
            await answer(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges)


def always(raw):
    async def answer(head, writer):
        writer.write(raw)

    return answer


def reply(status, body=b"", extra=b""):
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), extra, body)


@pytest.fixture
def closed_port():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and nobody else can take it
        yield taken.getsockname()[1]


class TestInference:
    """A model that answers computes, also where it refuses; one that fails or is silent doesn't."""

    @pytest.mark.parametrize(("status", "ok"), [(200, True), (400, True), (429, True), (500, False), (503, False)])
    async def test_answers(self, status, ok):
        asked = []

        async def answer(head, writer):
            asked.append(head)
            writer.write(reply(status, b"{}"))

        async with serving(answer) as address:
            result = await check_inference(address, "/v1/completions", b'{"max_tokens":1}', 10, "Bearer key")
        assert (result.ok, result.status) == (ok, status)
        assert asked[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
        assert b"authorization: Bearer key\r\n" in asked[0]
        assert b"content-type: application/json\r\n" in asked[0]
        assert b"content-length: 16\r\n" in asked[0]

    async def test_silence(self):
        async def answer(head, writer):
            await asyncio.Event().wait()

        async with serving(answer) as address:
            result = await check_inference(address, "/v1/completions", b"{}", 0.2)
        assert (result.ok, result.detail) == (False, "no answer within 0.2 s")


class TestProbe:
    """Any 2xx within the time is ok; any other result is not, and has the reason; nothing is raised."""

    async def test_ok(self):
        heads = []

        async def answer(head, writer):
            heads.append(head)
            writer.write(reply(200, b'{"status":"ok"}'))

        async with serving(answer) as address:
            result = await check_health(address, "/health", 10, "Bearer key")
        assert (result.ok, result.status, result.detail, result.inconclusive) == (True, 200, "HTTP 200", False)
        assert heads[0].startswith(b"GET /health HTTP/1.1\r\n")
        assert b"authorization: Bearer key" in heads[0].replace(b"Authorization", b"authorization")

    async def test_not_ok_says_what_the_worker_said(self):
        async with serving(always(reply(503, b'{"error":\n "Loading   model"}'))) as address:
            result = await check_health(address, "/health", 10)
        assert (result.ok, result.status) == (False, 503)
        assert result.detail == 'HTTP 503: {"error": "Loading model"}'

    async def test_redirects_are_not_followed(self):
        async with serving(always(reply(307, extra=b"location: /elsewhere\r\n"))) as address:
            result = await check_health(address, "/health", 10)
        assert (result.ok, result.status) == (False, 307)

    async def test_no_proxy_is_used(self, monkeypatch, closed_port):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
        async with serving(always(reply(200))) as address:
            assert (await check_health(address, "/health", 10)).ok

    async def test_nobody_listens(self, closed_port):
        result = await check_health(("127.0.0.1", closed_port), "/health", 10)
        assert (result.ok, result.status, result.detail) == (False, None, "nothing listens")
        assert not result.inconclusive

    async def test_accepts_but_never_answers(self):
        async def hang(head, writer):
            await asyncio.sleep(60)

        async with serving(hang) as address:
            # Long enough that it would take a stall of many seconds to be our own trouble.
            result = await check_health(address, "/health", 2.5)
        assert (result.ok, result.detail, result.inconclusive) == (False, "no answer within 2.5 s", False)

    async def test_a_dripping_answer_is_bounded_too(self):
        async def drip(head, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

        async with serving(drip) as address:
            assert (await check_health(address, "/health", 2.5)).detail == "no answer within 2.5 s"

    async def test_an_endless_body_is_not_read(self):
        async def flood(head, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n")
            while True:
                writer.write(b"x" * BODY_LIMIT)
                await writer.drain()

        async with serving(flood) as address:
            assert (await check_health(address, "/health", 10)).ok

    @pytest.mark.parametrize("raw", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", b""])
    async def test_nonsense_is_not_ok_and_not_our_fault(self, raw):
        async with serving(always(raw)) as address:
            result = await check_health(address, "/health", 10)
        assert (result.ok, result.inconclusive) == (False, False)
        assert result.detail

    async def test_many_that_hang_do_not_hold_up_another(self):
        async def answer(head, writer):
            if b"/hang" in head:
                await asyncio.sleep(60)
            writer.write(reply(200))

        async with serving(answer) as address:
            hanging = [asyncio.create_task(check_health(address, "/hang", 30)) for _ in range(120)]
            assert (await check_health(address, "/health", 20)).ok
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
            assert (await check_health(address, "/health", 20)).ok
        assert not [it for it in gc.get_objects() if isinstance(it, Connection) and not it.lost]


class TestCheckReady:
    """A second path is asked only once the first is ok, and with the worker's key."""

    @pytest.mark.parametrize(
        ("health", "models", "ok", "asked"),
        [
            (b"503 Loading", b"200 OK", False, ["/health"]),
            (b"200 OK", b"404 Not Found", False, ["/health", "/v1/models"]),
            (b"200 OK", b"200 OK", True, ["/health", "/v1/models"]),
        ],
    )
    async def test_both(self, health, models, ok, asked):
        heads = []

        async def answer(head, writer):
            heads.append(head)
            status = models if b"/v1/models" in head else health
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")

        async with serving(answer) as address:
            probe = await check_ready(address, "/health", "/v1/models", "Bearer secret", 5)
        assert probe.ok is ok
        assert [head.split()[1].decode() for head in heads] == asked
        keys = [b"authorization: bearer secret" in head.lower() for head in heads]
        assert keys == [False, True][: len(asked)]

    async def test_one(self):
        async with serving(always(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as address:
            assert (await check_ready(address, "/health", None, "Bearer secret", 5)).ok


class TestOurOwnTrouble:
    """Our own errors never count against a worker (fault 28)."""

    async def test_no_descriptors_left(self):
        async with serving(always(reply(200))) as address:
            assert (await check_health(address, "/health", 10)).ok
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those that are open stay open
            try:
                result = await check_health(address, "/health", 10)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert (result.ok, result.inconclusive) == (False, True)
            assert "Too many open files" in result.detail
            assert (await check_health(address, "/health", 10)).ok

    def test_no_descriptors_left_at_the_very_first_probe(self, tmp_path):
        code = """
import asyncio, resource, socket
from supervisor.host.upstream.probe import check_health
async def main():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        result = await check_health(address, "/", 5)
        assert (result.ok, result.inconclusive) == (False, True), result
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        result = await check_health(address, "/", 2.5)
        assert result.detail == "no answer within 2.5 s", result
asyncio.run(main())
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, cwd=Path(__file__).parents[3])

    async def test_our_stalled_loop(self):
        async def hang(head, writer):
            await asyncio.sleep(60)

        async with serving(hang) as address:
            asyncio.get_running_loop().call_soon(time.sleep, 1.3)  # from the moment when the probe first waits
            result = await check_health(address, "/health", 0.1)
        assert (result.ok, result.inconclusive) == (False, True)


class TestReadiness:
    """Three failures in a row make a worker unready, one success makes it ready again."""

    def test_falls_after_three_in_a_row(self):
        readiness = Readiness()
        assert [readiness.observe(r) for r in (BAD, BAD, OK, BAD, BAD, BAD, BAD)] == [False] * 5 + [True, False]
        assert not readiness.ready

    def test_rises_after_one(self):
        readiness = Readiness(ready=False)
        assert [readiness.observe(r) for r in (BAD, OK, OK)] == [False, True, False]
        assert readiness.ready

    def test_inconclusive_says_nothing(self):
        readiness = Readiness()
        assert not any(readiness.observe(OURS) for _ in range(100))
        assert [readiness.observe(r) for r in (BAD, OURS, BAD, OURS, BAD)] == [False] * 4 + [True]


class TestLiveness:
    """After six failures in a row without a byte the worker is dead."""

    def test_six_in_a_row(self):
        liveness = Liveness()
        assert [liveness.observe(BAD) for _ in range(5)] == [False] * 5
        liveness.observe(OK)
        assert [liveness.observe(BAD) for _ in range(7)] == [False] * 5 + [True, True]

    def test_a_worker_that_streams_is_alive(self):
        liveness = Liveness()
        assert not any(liveness.observe(BAD, bytes_flowed=True) for _ in range(100))
        assert [liveness.observe(BAD) for _ in range(6)] == [False] * 5 + [True]

    def test_inconclusive_kills_nobody(self):
        liveness = Liveness()
        assert not any(liveness.observe(OURS) for _ in range(100))


class TestStartup:
    """A start may take long while it makes progress, up to a limit."""

    def test_the_pause_stays_small_against_the_start(self):
        assert [startup_delay_s(elapsed) for elapsed in (0, 0.1, 1, 2, 10, 1000)] == [0.02, 0.02, 0.05, 0.1, 0.5, 0.5]
        assert startup_delay_s(1000, 0.05) == 0.05

    def test_standing_still(self):
        patience = StartupPatience(300, 1800, started_at=1000)
        assert patience.observe(Progress(10, 10, 10), 1000) is None
        assert patience.observe(Progress(10, 10, 10), 1299) is None
        assert "no progress for 300 s" in patience.observe(Progress(10, 10, 10), 1300)

    @pytest.mark.parametrize(
        "moved", [Progress(11, 10, 0), Progress(9, 10, 0), Progress(10, 11, 0), Progress(10, 10, MIB)]
    )
    def test_any_of_the_three_is_progress(self, moved):
        patience = StartupPatience(300, 1800, started_at=0)
        patience.observe(Progress(10, 10, 0), 0)
        assert patience.observe(moved, 299) is None
        assert patience.observe(moved, 598) is None
        assert patience.observe(moved, 599) is not None

    def test_memory_that_jitters_is_not_progress_but_slow_growth_is(self):
        jitter, growth = StartupPatience(300, 1800, 0), StartupPatience(300, 1800, 0)
        ends = [jitter.observe(Progress(0, 0, 50 * MIB + (t % 2) * 4096), t) for t in range(0, 302, 1)]
        assert ends[-1] is not None
        assert not any(growth.observe(Progress(0, 0, t * MIB // 100), t) for t in range(0, 1790, 10))

    def test_a_hard_limit(self):
        patience = StartupPatience(300, 1800, started_at=0)
        ends = [patience.observe(Progress(t), t) for t in range(1801)]
        assert ends[-2:] == [None, "not ready after 1800 s"]
