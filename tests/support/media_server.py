"""Pictures over HTTPS on loopback, from a server that can misbehave in every way, and a resolver that says what it is told."""

from __future__ import annotations

import base64
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from supervisor.host.media.media import MediaSource
from tests.support.fake_http import Handler
from tests.support.fake_remote import Seen, StandIn

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
WAV = b"RIFF\x24\0\0\0WAVEfmt " + bytes(40)
MP4 = b"\0\0\0\x18ftypisom" + bytes(40)
PUBLIC = "93.184.216.34"


def data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class Page:
    """What one path answers."""

    body: bytes = PNG
    kind: str | None = "image/png"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    endless: bool = False  # the body again and again, in chunks
    dripping: bool = False  # its first byte, and no more until the server is told
    short: bool = False  # half of what Content-Length says
    before: bytes = b""  # comes first
    before_again: bool = False  # and again, without end


class MediaServer(StandIn):
    """`pages` by path."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context)
        self.RequestHandlerClass = _Handler
        self.pages: dict[str, Page] = {"/a.png": Page()}
        self.ending = threading.Event()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def paths(self) -> list[str]:
        return [seen.path for seen in self.seen]


class _Handler(Handler):
    server: MediaServer

    def do_GET(self) -> None:
        self.server.seen.append(Seen.by(self))
        page = self.server.pages.get(self.path, Page(b"secret: not found", "text/plain", 404))
        self.wfile.write(page.before)
        while page.before_again:
            self.wfile.write(page.before)
        fields = {"Set-Cookie": "session=theirs"}
        if page.kind is not None:
            fields["Content-Type"] = page.kind
        fields |= {"Transfer-Encoding": "chunked"} if page.endless else {"Content-Length": str(len(page.body))}
        self.send_head(page.status, fields | page.headers)
        self.close_connection = True
        while page.endless:
            self.chunk(page.body)
        if page.dripping:
            self.wfile.write(page.body[:1])
            self.server.ending.wait()
        elif page.short:
            self.wfile.write(page.body[: len(page.body) // 2])
        else:
            self.wfile.write(page.body)


class ScriptedSource(MediaSource):
    """Names have the addresses that they are told to have, one answer after the other; all connections go to one port here."""

    def __init__(self, ca_file, port: int, **names: Sequence[Sequence[str]]) -> None:
        super().__init__(ca_file)
        self._port = port
        self.names = {name.replace("_", "."): [*answers] for name, answers in names.items()}
        self.resolved: list[str] = []
        self.connected: list[Sequence[str]] = []

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        answers = self.names.get(host)
        if not answers:
            raise OSError(-2, "Name or service not known")
        return answers.pop(0)

    def response(self, host, authority, addresses, port, target):
        self.connected.append([*addresses])
        return super().response(host, authority, ["127.0.0.1"] if addresses else [], self._port, target)
