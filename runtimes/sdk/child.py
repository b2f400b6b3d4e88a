"""Runs another project's server as a child of our worker, which translates between our API and the server's own.

The server listens on loopback without a key, because such programs have none. So other users of the machine can reach it if
they find its port. They can't impersonate it: before the worker sends anything, it checks that the child itself listens.
The child's output goes into the worker's log. If the child ends, the worker ends too, so that the supervisor sees the crash.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runtimes.sdk.worker_pool import Cancel

POLL_S = 0.1
GRACE_S = 3.0
HOST = "127.0.0.1"
SOCKETS = Path("/proc/net/tcp")
LISTEN = "0A"  # of a socket's states


class Child:
    """A child process with a server. `argv` builds its command line for a port. It is ready once `health` responds with 200."""

    def __init__(
        self, argv: Callable[[int], Sequence[str]], health: str, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.port = _free_port()
        self._health = health
        self._closing = False
        self._process = subprocess.Popen(argv(self.port), stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})})

    def wait_ready(self) -> None:
        """Blocks until the server responds. Raises RuntimeError if it ends first, for example because its port is taken."""
        while self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._is_only_listener() and self.request("GET", self._health)[0] == http.client.OK:
                    threading.Thread(target=self._watch_exit, name="child", daemon=True).start()
                    return
            time.sleep(POLL_S)  # in the thread that loads the model: no event loop waits here
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode} before it was ready")

    def request(
        self, method: str, path: str, body: bytes = b"", kind: str = "", cancel: Cancel | None = None
    ) -> tuple[int, bytes]:
        """Send a request. Returns status and body of the response. Blocks.

        Raises OSError, http.client.HTTPException, and CancelledWorkError; then the connection is closed.
        """
        connection = http.client.HTTPConnection(HOST, self.port)
        try:
            connection.request(method, path, body or None, {"Content-Type": kind} if kind else {})
            while cancel is not None and not select.select([connection.sock], [], [], POLL_S)[0]:
                cancel.check()
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def close(self) -> None:
        """End the child with all its threads. Blocks for at most `GRACE_S`."""
        self._closing = True
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_only_listener(self) -> bool:
        """Is the child the only process that listens on its port? Raises OSError."""
        rows = [line.split() for line in SOCKETS.read_text().splitlines()[1:]]
        listening = {row[9] for row in rows if row[3] == LISTEN and row[1].endswith(f":{self.port:04X}")}
        own = {str(link.readlink()) for link in Path(f"/proc/{self._process.pid}/fd").iterdir()}
        return bool(listening) and all(f"socket:[{inode}]" in own for inode in listening)

    def _watch_exit(self) -> None:
        code = self._process.wait()
        if self._closing:
            return
        sys.stderr.write(f"{self._process.args!r} ended with {code}\n")
        sys.stderr.flush()
        os._exit(1 if code >= 0 else 128 + min(-code, signal.NSIG))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
