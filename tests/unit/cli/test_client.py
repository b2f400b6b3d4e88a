"""The client of a daemon: whom it gives a key."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from supervisor.cli.client import Client
from supervisor.cli.exit_codes import UnreachableError
from supervisor.host.store import local_access


class Listener(HTTPServer):
    """Keeps the keys that it is sent."""

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.keys: list[str | None] = []
        keys = self.keys

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                keys.append(self.headers.get("authorization"))
                body = json.dumps({"from": host}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        super().__init__((host, port), Answers)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.mark.parametrize(("daemon", "stranger"), [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
def test_only_the_daemon_of_localhost_gets_the_offered_key(tmp_path, monkeypatch, daemon, stranger):
    """Somebody else may listen on the other address of the same name and port."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as ends:
        try:
            ours = Listener(daemon, 0)
            ends.callback(ours.close)
            port = ours.server_address[1]
            other = Listener(stranger, port)
            ends.callback(other.close)
        except OSError:
            pytest.skip("no IPv6 here, or the port is taken on the other address")
        access = ends.enter_context(local_access.offered(f"http://localhost:{port}", [daemon], port))
        assert Client(f"http://localhost:{port}").get("/") == {"from": daemon}
        assert (ours.keys, other.keys) == ([f"Bearer {access.key}"], [])
        address = f"[{stranger}]" if ":" in stranger else stranger
        assert Client(f"http://{address}:{port}").get("/") == {"from": stranger}
        assert other.keys == [None]


def test_nobody_answers_there_but_elsewhere(tmp_path, monkeypatch):
    """As where `serve --port` was told another address than the configuration."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lost = Client("http://127.0.0.1:1")
    with (
        local_access.offered("http://127.0.0.1:9", "127.0.0.1", 9),
        pytest.raises(UnreachableError, match=r"--url http://127\.0\.0\.1:9$"),
    ):
        lost.get("/")
    with pytest.raises(UnreachableError, match=r"llmux serve$"):
        lost.get("/")
