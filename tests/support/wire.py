"""Both ends of the proxy, scripted byte by byte: a worker that does what a test tells it, and the front with our protocol."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from uvicorn.server import ServerState

from supervisor.dialects.openai import OPENAI
from supervisor.errors import LlmuxError
from supervisor.gateway.attempt import Attempt, Outcome
from supervisor.gateway.body.body import read_body
from supervisor.gateway.disconnect import CancelOnDisconnect, Receive, Scope, Send
from supervisor.gateway.error_response import error_body, error_headers
from supervisor.gateway.forward import break_off, forward, send_refusal
from supervisor.gateway.request import Request
from supervisor.gateway.response_cycle import ResponseCycle
from supervisor.gateway.upstream_error import WorkerAnswerError
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.upstream import UpstreamPool
from supervisor.server.protocol import GuardedProtocol

PATIENCE_S = 30.0
IDLE_S = 60.0  # a machine that pauses for a moment is no idle connection


class Conn:
    """A connection the worker accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request; raises IncompleteReadError when the peer closes instead."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            body = b""
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readuntil(b"\r\n")
            await self.reader.readuntil(b"\r\n")
            return head, body
        for line in lower.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head, await self.reader.readexactly(int(line.split(b":")[1]))
        return head, b""

    async def send(self, data: bytes) -> None:
        if self.writer.transport.is_closing():
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def closed(self) -> None:
        """Wait until the peer is gone."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Conn], Awaitable[None]]


class Worker:
    """Runs `script` for each connection; closes it when the script ends. Errors of scripts fail the test."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.accepted = 0
        self.active = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.errors: list[BaseException] = []
        self.port = 0

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.active += 1
        try:
            await self.script(Conn(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            self.active -= 1
            writer.close()


@asynccontextmanager
async def worker(script: Script) -> AsyncIterator[Worker]:
    running = Worker(script)
    server = await asyncio.start_server(running.serve_one, "127.0.0.1", 0, limit=1 << 20)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
        assert not running.errors, running.errors


@asynccontextmanager
async def handed(path: Path, script: Script) -> AsyncIterator[Worker]:
    """The same for the connections of a worker that a daemon started: `handed_worker.py`, with `path` as its socket."""
    running = Worker(script)
    loop = asyncio.get_running_loop()
    path.unlink(missing_ok=True)

    async def take() -> None:
        while True:
            channel, _ = await loop.sock_accept(server)
            with channel:
                channel.setblocking(True)
                _, (number,), _, _ = await asyncio.to_thread(socket.recv_fds, channel, 1, 1)
            taken = socket.socket(fileno=number)
            taken.setblocking(False)
            streams = await asyncio.open_connection(sock=taken, limit=1 << 20)
            serving.add(asyncio.create_task(running.serve_one(*streams)))

    serving: set[asyncio.Task[None]] = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(128)
        server.setblocking(False)
        taking = asyncio.create_task(take())
        try:
            yield running
        finally:
            taking.cancel()
            for each in serving:
                each.cancel()
            await asyncio.wait({taking, *serving})
            path.unlink()
    assert not running.errors, running.errors


def handing(path: Path, **keys: object) -> dict[str, object]:
    """A model whose connections `handed` serves."""
    cmd = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("handed_worker.py")),
        "--port",
        "${port}",
        "--to",
        str(path),
    ]
    return {"runtime": "command", "cmd": cmd, "vram_mib": 10, **keys}


@dataclass
class Answer:
    """As a client reads it. `whole` is false where its end is missing."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool = True
    trailers: list[tuple[str, str]] = field(default_factory=list)

    def header(self, name: str) -> list[str]:
        return [value for known, value in self.headers if known.lower() == name]


def answers(data: bytes, *methods: str) -> list[Answer]:
    """What came on one connection, after requests of these methods; interim answers are passed over. Raises on anything more."""
    found = []
    for method in methods:
        status = 100
        while status < 200:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                assert not head, head
                return found
            line, *fields = head.decode("latin-1").split("\r\n")
            status = int(line.split()[1])
        answer = Answer(status, _fields(fields), b"")
        found.append(answer)
        if method == "HEAD" or status in {204, 304}:
            continue
        if "chunked" in answer.header("transfer-encoding"):
            data = _chunks(answer, data)
        elif length := answer.header("content-length"):
            answer.body, data = data[: int(length[0])], data[int(length[0]) :]
            answer.whole = len(answer.body) == int(length[0])
        else:
            answer.body, data = data, b""
    assert not data, data[:200]
    return found


def _fields(lines: list[str]) -> list[tuple[str, str]]:
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]


def _chunks(answer: Answer, data: bytes) -> bytes:
    answer.whole = False
    while True:
        line, end, rest = data.partition(b"\r\n")
        if not end:
            return b""
        size = int(line.split(b";")[0], 16)
        if size == 0:
            trailers, end, data = rest.partition(b"\r\n\r\n") if rest[:2] != b"\r\n" else (b"", b"\r\n", rest[2:])
            answer.trailers = _fields(trailers.decode("latin-1").split("\r\n")) if trailers else []
            answer.whole = bool(end)
            return data
        answer.body += rest[:size]
        data = rest[size + 2 :]


def answering(response: bytes, *, times: int = 1000) -> Script:
    """Reads a request, sends `response`, and again."""

    async def script(conn: Conn) -> None:
        for _ in range(times):
            await conn.request()
            await conn.send(response)

    return script


def ok(body: bytes, *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def pool(port: int, **options: float | str) -> AsyncIterator[UpstreamPool]:
    # A loop that stands still for two seconds is no worker that is gone.
    made = UpstreamPool("127.0.0.1", port, **{"idle_s": IDLE_S, "connect_s": PATIENCE_S} | options)
    try:
        yield made
    finally:
        made.close()


class Front:
    """A server with our protocol; `outcomes` collects what `forward` reported, `tasks` are the running requests."""

    def __init__(self) -> None:
        self.port = 0
        self.outcomes: list[Outcome] = []
        self.errors: list[BaseException] = []
        self.state = ServerState()
        self.scopes: list[Scope] = []


@asynccontextmanager
async def front(app, *, seen: Front | None = None):
    """Serve an ASGI `app` on loopback."""
    running = seen or Front()
    config = uvicorn.Config(app, http=GuardedProtocol, ws="none", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: GuardedProtocol(config, running.state, {}), "127.0.0.1", 0, backlog=1024)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
        for connection in list(running.state.connections):
            connection.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while running.state.connections or running.state.tasks:
                await asyncio.sleep(0.005)


def cycle_of(scope: Scope, receive: Receive, send: Send) -> ResponseCycle:
    """One whose request goes to a worker as it is."""
    path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    request = Request(b"req-1", asyncio.get_running_loop().time(), OPENAI)
    cycle = ResponseCycle(scope, receive, send, request, RequestBuffer())
    request.attempt = Attempt(path=path, headers=cycle.head.for_worker)
    return cycle


@asynccontextmanager
async def proxied(script: Script, **options):
    """A scripted worker behind `forward` behind our protocol: yields (front, worker)."""
    seen = Front()
    async with worker(script) as behind, pool(behind.port, **options) as upstream:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.scopes.append(scope)
            cycle = cycle_of(scope, receive, send)
            seen.outcomes.append(cycle.request.attempt.outcome)
            try:
                cycle.request.attempt.body = RequestBuffer(data=await read_body(scope, receive, 1 << 26))
                with CancelOnDisconnect(scope):
                    try:
                        await forward(cycle, upstream)
                    except WorkerAnswerError as error:
                        await send_refusal(cycle, error, ())
                    except LlmuxError as error:
                        if not cycle.request.attempt.outcome.started:
                            raise
                        await break_off(cycle, error, ())
            except LlmuxError as error:
                data = error_body(error, OPENAI)
                headers = error_headers(error, data)
                await send({"type": "http.response.start", "status": error.status, "headers": headers})
                await send({"type": "http.response.body", "body": data})
            except BaseException as error:
                seen.errors.append(error)
                raise

        async with front(app, seen=seen):
            yield seen, behind


async def talk(port: int, data: bytes) -> bytes:
    """Send bytes, read until the peer closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await reader.read(-1)
            except ConnectionError:
                return b""
    finally:
        writer.close()


def post(body: bytes = b"{}", *fields: bytes, path: bytes = b"/v1/x", close: bool = True) -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: a", b"Content-Length: %d" % len(body), *fields]
    if close:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():
            await asyncio.sleep(0.002)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def receiving(*pieces: bytes):
    """An ASGI receive that brings these pieces, then a disconnect."""
    messages = [
        {"type": "http.request", "body": piece, "more_body": n + 1 < len(pieces)} for n, piece in enumerate(pieces)
    ]
    left = iter([*messages, {"type": "http.disconnect"}])

    async def receive():
        return next(left)

    return receive
