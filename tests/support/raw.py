"""Requests byte by byte, for what no HTTP library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.daemon import Daemon
from tests.support.limits import LIMIT_S


@dataclass(frozen=True)
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    closed: bool

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


def request(daemon: Daemon, *lines: str, body: bytes = b"") -> Reply:
    """Send a head made of these lines, and a body; read one answer."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=LIMIT_S) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1") + body)
        with connection.makefile("rb") as answer:
            status = int(answer.readline().split()[1])
            headers = []
            while line := answer.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers.append((name.lower(), value.strip()))
            length = next((int(value) for name, value in headers if name == "content-length"), 0)
            content = answer.read(length)
            return Reply(status, headers, content, ("connection", "close") in headers)


@contextmanager
def pending(daemon: Daemon, path: str, body: dict[str, object]) -> Iterator[socket.socket]:
    """A request that was sent and whose answer nobody reads; the client leaves at the end of the block, or by `close()`."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode() + content)
        yield connection
