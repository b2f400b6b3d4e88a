"""A program of others below a worker: it is asked once it listens itself, and nobody else is taken for it."""

from __future__ import annotations

import http.server
import sys
import threading

import pytest

from runtimes.sdk import child as children
from runtimes.sdk.child import Child
from runtimes.sdk.worker_pool import Cancel, CancelledWorkError

SERVER = """
import http.server, sys, time
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            time.sleep(600)
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b"said")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def begun(code: str = SERVER) -> Child:
    return Child(lambda port: [sys.executable, "-IS", "-c", code, str(port)], "/health")


@pytest.fixture
def server():
    found = begun()
    found.wait_ready()
    yield found
    found.close()


class TestChild:
    """Started, asked, ended."""

    def test_asked(self, server):
        assert server.request("GET", "/health") == (200, b"said")
        assert server.request("GET", "/other")[0] == 404

    def test_a_request_that_is_cancelled(self, server):
        cancel = Cancel()
        cancel.set()
        with pytest.raises(CancelledWorkError):
            server.request("GET", "/slow", cancel=cancel)

    def test_one_that_ends_before_it_is_ready(self):
        with pytest.raises(RuntimeError, match="ended with 3 before it was ready"):
            begun("raise SystemExit(3)").wait_ready()

    def test_one_that_ignores_sigterm_is_killed(self, monkeypatch):
        monkeypatch.setattr(children, "GRACE_S", 0.1)
        deaf = begun(f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SERVER}")
        deaf.wait_ready()
        deaf.close()
        with pytest.raises(OSError, match="refused"):
            deaf.request("GET", "/health")


class TestImpostor:
    """Somebody who listens on its port before it does gets nothing."""

    def test_he_is_not_taken_for_it(self, monkeypatch):
        asked: list[str] = []

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()

        impostor = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        try:
            monkeypatch.setattr(children, "_free_port", lambda: impostor.server_address[1])
            with pytest.raises(RuntimeError, match="ended with 1 before it was ready"):
                begun().wait_ready()  # it can't have its port
        finally:
            impostor.shutdown()
            impostor.server_close()
        assert asked == []
