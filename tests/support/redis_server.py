"""A real Redis on a free port, with nothing kept on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import wait_until
from tests.support.ports import quiet_ports

PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed (apt install redis-server)")


class RedisServer:
    """`start` may be called again after `stop`: then it is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = quiet_ports(1)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        assert PROGRAM is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [PROGRAM, *options, "--dir", str(self.folder)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        wait_until(self._listens, what="Redis listens")
        return self

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def ask(self, *words: str) -> bytes:
        """One command, by hand; the raw answer."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            return connection.recv(1 << 20)

    def _listens(self) -> bool:
        try:
            return self.ask("PING").startswith(b"+PONG")
        except OSError:
            return False
