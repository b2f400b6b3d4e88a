"""A cheap load generator: raw asyncio protocols that parse a body's length once and then only count bytes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Final

PATH: Final = "/v1/chat/completions"
KEY: Final = "sk-llmux-bench-0123456789abcdef"
LIMITED_KEY: Final = "sk-llmux-limited-0123456789abcdef"
_STAMP = re.compile(rb'"t":(\d{19})')


def post(document: object, path: str = PATH, *, order: str = "", key: str = KEY) -> bytes:
    """A request with this body; `order`: the stub's instructions."""
    body = json.dumps(document).encode()
    fields = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}", "User-Agent: bench"]
    fields += ["Content-Type: application/json", "Accept: */*", f"Content-Length: {len(body)}"]
    fields += [f"X-Bench: {order}"] if order else []
    return "\r\n".join([*fields, "", ""]).encode() + body


def request_bytes(order: str = "", *, padding: int = 0) -> bytes:
    """A chat completion for the model `stub`, with `padding` bytes of message text."""
    messages = [{"role": "user", "content": "x" * padding or "Say hello."}]
    return post({"model": "stub", "messages": messages, "stream": order.startswith("stream")}, order=order)


HEALTH: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Repeater(asyncio.Protocol):
    """Sends the same request again and again on one connection and times each answer."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._pending = b""
        self._left = 0  # bytes of the body still to come
        self._in_head = True
        self._chunked = False
        self._sent_at = 0
        self._stopping = False
        self.latencies_ns: list[int] = []
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a TCP connection has one
        self._transport = transport
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def stop(self) -> None:
        self._stopping = True

    def _send(self) -> None:
        self._sent_at = time.monotonic_ns()
        self._in_head = True
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            data = self._pending + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._pending = data
                return
            self._pending = b""
            self._in_head = False
            length = _body_length(data[:end])
            self._chunked = length is None
            self._left = (length or 0) + end + 4
        self._left -= len(data)
        assert self._chunked or self._left >= 0, "more bytes than an answer has"
        if data.endswith(b"\r\n0\r\n\r\n") if self._chunked else self._left == 0:
            self.latencies_ns.append(time.monotonic_ns() - self._sent_at)
            if self._stopping:
                self._transport.close()
            else:
                self._send()


_LENGTH = re.compile(rb"(?i)content-length: (\d+)")


def _body_length(head: bytes) -> int | None:
    """The body's length by the head; None: the body is chunked."""
    assert head.startswith(b"HTTP/1.1 200"), head.decode()
    match = _LENGTH.search(head)
    return int(match[1]) if match else None


class Listener(asyncio.Protocol):
    """Reads one event stream and keeps the delay of each event since the stub wrote it."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.delays_ns: list[int] = []
        self.first_ns = 0  # from the request to the first event
        self.started = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a TCP connection has one
        self.transport = transport
        if self._request:
            self.send(self._request)

    def send(self, request: bytes) -> None:
        self._sent_ns = time.monotonic_ns()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        for stamp in _STAMP.findall(data):
            self.delays_ns.append(now - int(stamp))
        if self.delays_ns and not self.started.done():
            self.first_ns = now - self._sent_ns
            self.started.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.started, self.lost):
            if not future.done():
                future.set_result(None)


@dataclass
class Burst:
    """The result of one run of a load."""

    count: int
    seconds: float
    latencies_ns: list[int] = field(repr=False)


async def repeat(port: int, connections: int, seconds: float, *, request: bytes | None = None) -> Burst:
    """Small requests, one after the other on each of `connections`."""
    loop = asyncio.get_running_loop()
    payload = request or request_bytes()
    clients = [
        (await loop.create_connection(lambda: Repeater(payload), "127.0.0.1", port))[1] for _ in range(connections)
    ]
    began = time.monotonic()
    await asyncio.sleep(seconds)
    for client in clients:
        client.stop()
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.lost for client in clients))
    latencies = [latency for client in clients for latency in client.latencies_ns]
    return Burst(len(latencies), time.monotonic() - began, latencies)


async def listen(port: int, streams: int, interval_ms: int) -> list[Listener]:
    """Open event streams; returns when all have begun."""
    loop = asyncio.get_running_loop()
    payload = request_bytes(f"stream 1000000 {interval_ms}")
    clients = [(await loop.create_connection(lambda: Listener(payload), "127.0.0.1", port))[1] for _ in range(streams)]
    async with asyncio.timeout(20):
        await asyncio.gather(*(client.started for client in clients))
    return clients


async def begin_at_once(port: int, streams: int) -> list[Listener]:
    """Open connections, then send a request for an event stream on all of them in one go; returns when all have begun."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: Listener(b""), "127.0.0.1", port))[1] for _ in range(streams)]
    await asyncio.sleep(0.05)  # let the server accept all connections
    for client in clients:
        client.send(request_bytes("stream 1000000 1000 now"))
    async with asyncio.timeout(20):
        await asyncio.gather(*(client.started for client in clients))
    return clients


async def hang_up(clients: list[Listener]) -> None:
    """Close streams and wait until they are."""
    for client in clients:
        client.transport.abort()
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.lost for client in clients))
