"""What the fakes that speak HTTP share. Standard library only, and little of it: each fake worker imports this."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping

PHRASES = {101: "Switching Protocols", 200: "OK", 404: "Not Found", 500: "Internal Server Error"}


class Fields:
    """The headers of a request, as they came."""

    def __init__(self) -> None:
        self._fields: list[tuple[str, str]] = []

    def append(self, field: tuple[str, str]) -> None:
        self._fields.append(field)

    def get(self, name: str, default: str | None = None) -> str | None:
        return next((value for known, value in self._fields if known.lower() == name.lower()), default)

    def __getitem__(self, name: str) -> str | None:
        return self.get(name)

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def items(self) -> list[tuple[str, str]]:
        return self._fields


class Handler(socketserver.StreamRequestHandler):
    """What the standard library's handler does for a subclass with `do_GET` and the like. Importing that one takes half of the
    time in which a fake worker starts.
    """

    disable_nagle_algorithm = True  # head and body are written apart: 40 ms an answer otherwise
    close_connection = False

    def handle(self) -> None:
        while not self.close_connection and (line := self.rfile.readline()):
            self.requestline = line.decode("latin-1").rstrip("\r\n")
            self.command, self.path, version = self.requestline.split()
            self.headers = Fields()
            while line := self.rfile.readline().decode("latin-1").rstrip("\r\n"):
                name, _, value = line.partition(":")
                self.headers.append((name, value.strip()))
            wish = (self.headers.get("Connection") or "").lower()
            self.close_connection = wish == "close" or (version == "HTTP/1.0" and wish != "keep-alive")
            self._head: list[str] = []
            getattr(self, f"do_{self.command}", self.do_other)()

    def do_other(self) -> None:
        self.close_connection = True
        self.send_json(501, {"error": {"message": f"no {self.command} here", "type": "invalid_request_error"}})

    def send_response(self, status: int) -> None:
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        self._head = [f"HTTP/1.1 {status} {PHRASES.get(status, 'Unknown')}", "Server: fake", f"Date: {date}"]

    def send_header(self, name: str, value: str) -> None:
        self._head.append(f"{name}: {value}")
        if name.lower() == "connection" and value.lower() == "close":
            self.close_connection = True

    def end_headers(self) -> None:
        self.wfile.write("\r\n".join([*self._head, "", ""]).encode("latin-1"))

    def body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

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


@contextlib.contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[socketserver.TCPServer]:
    """It answers meanwhile."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
