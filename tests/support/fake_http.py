"""What the fakes that speak HTTP share: their handler, a server on loopback, and programs that run one. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True)
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart: 40 ms an answer otherwise

    def log_message(self, *_: object) -> None:
        """Nothing: what was asked is kept, where a test wants to know."""

    def body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def seen(self, body: bytes = b"") -> Seen:
        return Seen(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)

    def send_head(self, status: int, fields: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, status: int, body: bytes, kind: str = "application/json", **fields: str) -> None:
        self.send_head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **fields})
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, status: int, value: object) -> None:
        self.send(status, json.dumps(value).encode())

    def begin_stream(self, kind: str = "text/event-stream") -> None:
        self.send_head(200, {"Content-Type": kind, "Transfer-Encoding": "chunked"})

    def event(self, value: object) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        """The last one is empty."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


_Server = TypeVar("_Server", bound=ThreadingHTTPServer)


@contextlib.contextmanager
def serving(server: _Server) -> Iterator[_Server]:
    """It answers meanwhile."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def program(path: Path, fake: str) -> Path:
    """A program there that runs `fake`, such as `fake_servers.run_tgi`, with its words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -IS\n{code(fake)}")
    path.chmod(0o755)
    return path


def code(fake: str) -> str:
    """What such a program consists of."""
    module, _, function = fake.partition(".")
    return (
        f"import sys\nsys.path.append({REPOSITORY!r})\n"
        f"from tests.support.{module} import {function}\nsys.exit({function}(sys.argv[1:]))\n"
    )
