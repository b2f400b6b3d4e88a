"""A WebSocket's client, frame by frame."""

from __future__ import annotations

import os
import socket
from typing import Self

from tests.support.limits import LIMIT_S

TEXT, CLOSE = 0x81, 0x88


class WebSocket:
    """Connected to `path` on loopback, unless `status` isn't 101; then `body` says why."""

    def __init__(self, port: int, path: str, *fields: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: keep-alive, Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
            *fields,
        ]
        self.socket.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        self._file = self.socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers = dict(self._field(line) for line in iter(lambda: self._file.readline().strip(), b""))
        self.body = self._file.read(int(self.headers.get("content-length", 0))) if self.status != 101 else b""

    @staticmethod
    def _field(line: bytes) -> tuple[str, str]:
        name, _, value = line.decode().partition(":")
        return name.lower(), value.strip()

    def send(self, data: bytes, kind: int = TEXT) -> None:
        """One frame, masked as clients must."""
        mask = os.urandom(4)
        length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2)
        self.socket.sendall(bytes([kind]) + length + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def receive(self) -> tuple[int, bytes]:
        """The next frame's kind and content. Raises EOFError at the connection's end."""
        head = self._file.read(2)
        if len(head) < 2:
            raise EOFError
        length = int.from_bytes(self._file.read(2)) if head[1] == 126 else head[1]
        return head[0], self._file.read(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self.socket.close()
