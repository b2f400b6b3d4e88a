"""A stand-in for somebody else's OpenAI-compatible API: a real server on loopback, over HTTP or HTTPS.

It keeps what it was sent, answers each path as such APIs do, and can be told how to answer next: with an error, after a
while, or with an answer that breaks off. Its certificates come from an authority made for the test.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import trustme

from tests.support.fake_http import Handler
from tests.support.limits import LIMIT_S

KEY = "sk-theirs-4f9d1c0b7a6e5d38"
MODEL = "provider-large"
AUDIO = bytes(range(256)) * 40


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

    @classmethod
    def by(cls, handler: Handler, body: bytes = b"") -> Seen:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        return cls(handler.command, handler.path, headers, body)


@dataclass(frozen=True)
class Reply:
    """How to answer once, instead of as usual."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    close_at_once: bool = False  # without a byte of an answer
    breaks_off: bool = False  # after `body`, of which more was promised


class StandIn(ThreadingHTTPServer):
    """`hold` keeps streams after their first piece until it is set; `left` is set when a client goes meanwhile.

    Unless it is `listening`, connections are refused until `server_activate()`; the port is nobody else's all the same.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, context: ssl.SSLContext | None = None, *, listening: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.server_bind()
        if listening:
            self.server_activate()
        self.context = context
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was seen and told."""
        self.seen: list[Seen] = []
        self.replies: deque[Reply] = deque()
        self.models_status = 200
        self.hold = threading.Event()
        self.hold.set()
        self.streaming = threading.Event()
        self.left = threading.Event()

    @property
    def url(self) -> str:
        scheme = "https" if self.context is not None else "http"
        return f"{scheme}://localhost:{self.server_address[1]}/api/v1"

    def finish_request(self, request, client_address) -> None:
        if self.context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(LIMIT_S)
        try:
            secured = self.context.wrap_socket(request, server_side=True)
        except OSError:  # a client that does not trust us
            return
        with secured:
            secured.settimeout(None)
            super().finish_request(secured, client_address)

    def shutdown(self) -> None:
        self.hold.set()
        super().shutdown()

    def handle_error(self, request, client_address) -> None:
        """Clients that leave are what some tests are about."""

    def inference(self) -> list[Seen]:
        return [seen for seen in self.seen if not seen.path.endswith("/models")]


class _Handler(Handler):
    server: StandIn

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.body()
        self.server.seen.append(Seen.by(self, body))
        endpoint = self.path.removeprefix("/api/v1")
        if endpoint == "/models":
            self._answer(self.server.models_status, json.dumps({"data": [{"id": MODEL}]}).encode())
        elif self.server.replies:
            self._as_told(self.server.replies.popleft())
        elif (key := self.headers.get("authorization")) != f"Bearer {KEY}":
            text = f"Incorrect API key provided: {key}"
            self._answer(401, json.dumps({"error": {"message": text, "code": "invalid_api_key"}}).encode())
        elif endpoint in {"/audio/transcriptions", "/audio/translations", "/images/edits", "/images/variations"}:
            self._answer(200, json.dumps({"text": "as heard", "size": len(body)}).encode())
        elif endpoint == "/audio/speech":
            self._answer(200, AUDIO, {"Content-Type": "audio/mpeg"})
        elif json.loads(body).get("stream"):
            self._stream()
        else:
            self._answer(200, json.dumps(_document(endpoint)).encode())

    def _as_told(self, reply: Reply) -> None:
        if reply.close_at_once:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif reply.breaks_off:
            self.close_connection = True
            self.send_head(reply.status, {"Transfer-Encoding": "chunked"} | reply.headers)
            self.chunk(reply.body)
        else:
            self._answer(reply.status, reply.body, reply.headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Set-Cookie": "session=theirs",
            "Strict-Transport-Security": "max-age=1000",
            "OpenAI-Organization": "ours-there",
            "X-RateLimit-Remaining-Requests": "41",
        }
        self.send_head(status, fields | (headers or {}))
        self.wfile.write(body)

    def _stream(self) -> None:
        self.begin_stream()
        for number, word in enumerate(("Hello", " from", " afar")):
            if number == 1:
                self.server.streaming.set()
                self._wait()
            reason = "stop" if word == " afar" else None
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": reason}
            self.event({"choices": [choice], "model": MODEL})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def _wait(self) -> None:
        """For the test, or for the client to leave."""
        while not self.server.hold.wait(0.02):
            if select.select([self.connection], [], [], 0)[0]:
                self.server.left.set()
                raise ConnectionAbortedError


def _document(endpoint: str) -> dict:
    if endpoint == "/embeddings":
        return {"object": "list", "data": [{"index": 0, "embedding": [0.5, 0.25]}], "model": MODEL}
    if endpoint == "/images/generations":
        return {"data": [{"b64_json": "aGVsbG8="}]}
    if endpoint == "/responses":
        return {"object": "response", "output_text": "Hello from afar", "model": MODEL}
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    if endpoint == "/completions":
        return {"object": "text_completion", "choices": [{"index": 0, "text": "Hello from afar"}], "usage": usage}
    message = {"role": "assistant", "content": "Hello from afar"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def context(self, *names: str) -> ssl.SSLContext:
        """A server's, with a certificate for these names."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*names).configure_cert(context)
        return context
