"""Clients that are slow, many, or send much: what they may take is bounded, and those who behave are served."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from supervisor.gateway.disconnect import CancelOnDisconnect
from supervisor.server.protocol import GuardedProtocol
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.held import held
from tests.support.wire import Front, front

MIB = 1024 * 1024
BUDGET_MIB = 64
BODY = 31 * MIB
GATE = "slow-may-load"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow-and-many")
    endpoints = ["/echo", "/v1/chat/completions"]
    models = {"plain": fake(endpoints=endpoints), "slow": held(folder / GATE, endpoints=endpoints)}
    with running(
        folder, {"models": models, "limits": {"bodies_mib": BUDGET_MIB, "loads_per_device": 8}}, by_exec=True
    ) as daemon:
        daemon.post("/v1/admin/models/plain/load").raise_for_status()
        yield daemon


def rss_mib(daemon: Daemon) -> float:
    assert daemon.process is not None
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def kept(daemon: Daemon) -> dict[str, float]:
    """Bytes of bodies, by where they are, as `/metrics` tells."""
    found = re.findall(r'^llmux_body_bytes{where="(\w+)"} (\S+)$', daemon.get("/metrics").text, re.MULTILINE)
    return {where: float(size) for where, size in found}


def head(size: int, *fields: str, path: str = "/echo") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {size}", *fields, "", "")
    return "\r\n".join(lines).encode()


def body(model: str, size: int) -> bytes:
    """JSON of about `size` bytes, not twice the same."""
    return json.dumps({"model": model, "input": random.Random().randbytes(size // 2).hex()}).encode()


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port, limit=64 * MIB)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer with a length."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


class TestManyLargeBodies:
    """All bodies together take no more memory than `bodies_mib`."""

    async def test_unfinished_ones(self, daemon):
        """Whoever has no room is told at once, with what to do, and short questions are still answered."""
        before = rss_mib(daemon)
        refused = Counter[str]()
        peak = 0.0
        leave = asyncio.Event()

        async def send() -> None:
            async with connected(daemon) as (reader, writer):
                with contextlib.suppress(ConnectionError):  # refused while it sends
                    writer.write(head(BODY))
                    for _ in range(30):
                        writer.write(bytes(MIB))
                        await writer.drain()
                reply = asyncio.create_task(answer(reader))
                await asyncio.wait({reply, asyncio.create_task(leave.wait())}, return_when=asyncio.FIRST_COMPLETED)
                if not reply.done():
                    reply.cancel()
                elif reply.exception() is not None:
                    refused["cut"] += 1  # it sent on for too long
                else:
                    status, headers, content = reply.result()
                    assert (status, "retry-after" in headers) == (503, True)
                    refused[json.loads(content)["error"]["code"]] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(send())
            await until(lambda: refused.total() >= 20)
            assert refused["busy"]
            peak = rss_mib(daemon)
            assert BODY <= kept(daemon)["memory"] <= BUDGET_MIB * MIB
            assert (await asyncio.to_thread(daemon.chat, "plain")).status_code == 200
            leave.set()
        assert peak - before < BUDGET_MIB * 9 / 8 + 60, "an eighth more while they grow, and what connections read"
        await until(lambda: rss_mib(daemon) - before < 20)
        assert kept(daemon) == {"memory": 0, "disk": 0}

    async def test_those_that_wait_are_on_disk(self, daemon):
        """More requests can wait than fit into memory, and each body reaches its worker as it came."""
        before = rss_mib(daemon)
        count, size = 8, 20 * MIB
        sending = asyncio.Semaphore(2)

        async def ask() -> None:
            sent = body("slow", size)
            digest = hashlib.sha256(sent).digest()
            await sending.acquire()  # before it connects: a connection may not wait for long
            async with connected(daemon) as (reader, writer):
                writer.write(head(len(sent), "Connection: close") + sent)
                await writer.drain()
                del sent
                await until(lambda: kept(daemon)["memory"] == 0)
                sending.release()
                status, _, content = await answer(reader)
                assert status == 200, content
                assert hashlib.sha256(content).digest() == digest

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(ask())
            await until(lambda: len(daemon.get("/v1/admin/requests").json()["data"]) == count)
            await until(lambda: rss_mib(daemon) - before < 30)
            await until(lambda: kept(daemon)["disk"] > count * size)
            assert not [
                entry for entry in daemon.state_dir.iterdir() if entry.is_file() and entry.stat().st_size > size
            ]
            (daemon.folder / GATE).touch()
        await until(lambda: rss_mib(daemon) - before < 30)
        assert kept(daemon) == {"memory": 0, "disk": 0}


class TestSlowReaders:
    """Whoever reads more slowly than it must, what waits for it, is cut; a slow stream's reader is not."""

    @pytest.fixture
    async def site(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "read_window_s", 0.5)
        monkeypatch.setattr(GuardedProtocol, "least_bytes_per_s", 200_000.0)

        async def app(scope, receive, send):
            piece, pause_s = (bytes(200_000), 0.0) if scope["path"] == "/much" else (b"a word ", 0.05)
            with CancelOnDisconnect(scope):
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while scope["path"] != "/all":
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await asyncio.sleep(pause_s)
                await send({"type": "http.response.body", "body": bytes(16 * MIB), "more_body": False})

        async with front(app) as running:
            yield running

    async def read(self, running: Front, path: str, bytes_per_s: float, until_s: float) -> bool:
        """Was it cut within that time?"""
        with socket.socket() as connection:
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024
            )  # or the kernel reads megabytes for it
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", running.port))
            await loop.sock_sendall(connection, f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
            began, taken = loop.time(), 0
            while (elapsed := loop.time() - began) < until_s:
                if taken < bytes_per_s * elapsed:
                    try:
                        piece = await loop.sock_recv(connection, 4096)
                    except ConnectionError:
                        return True
                    if not piece:
                        return True
                    taken += len(piece)
                else:
                    await asyncio.sleep(0.005)
        return False

    async def test_of_much_is_cut(self, site):
        assert await self.read(site, "/much", 10_000, until_s=60.0)

    async def test_of_a_whole_answer_is_cut(self, site):
        """Its connection is closing already, and would do so for ever."""
        assert await self.read(site, "/all", 10_000, until_s=60.0)

    async def test_that_is_fast_enough_is_served(self, site):
        assert not await self.read(site, "/much", 2_000_000, until_s=2.0)

    async def test_of_a_slow_stream_is_served(self, site):
        """It takes 140 bytes a second, and there are no more."""
        assert not await self.read(site, "/little", 2_000_000, until_s=2.0)


class TestHalfClosed:
    """A client that has sent all, and says so, still gets its answer."""

    async def test_gets_the_rest_of_its_answer(self, daemon):
        content = body("plain", 16 * MIB)
        async with connected(daemon) as (reader, writer):
            writer.write(head(len(content)) + content)
            await reader.readuntil(b"\r\n\r\n")
            writer.write_eof()
            assert await reader.read() == content

    async def test_gets_its_answer(self, daemon):
        for fields in ({}, {"stream": True}, {"fake": {"delay": 0.5}}, {"stream": True, "fake": {"chunk_delay": 0.1}}):
            content = json.dumps({"model": "plain", "messages": [], **fields}).encode()
            async with connected(daemon) as (reader, writer):
                writer.write(head(len(content), path="/v1/chat/completions") + content)
                writer.write_eof()
                said = await reader.read()
            assert b"HTTP/1.1 200 OK\r\n" in said, fields
            assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if fields.get("stream") else b"}"), fields
