"""A server program of others that a worker of ours starts, asks and ends: the worker says in our API what it says in its own.

It listens on loopback without a key: such programs know none. So other users of the machine can reach it while it runs, if they
find its port. They can't pass for it: whoever listens there must be the program itself, before anything is sent to it.
Its output goes into the worker's log. Where it ends by itself, the worker ends too, so that the supervisor sees the crash.
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
    """One such program. `argv` gets the port it has to listen on; it is there once `health` responds with 200."""

    def __init__(
        self, argv: Callable[[int], Sequence[str]], health: str, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.port = _free_port()
        self._health = health
        self._closing = False
        self._process = subprocess.Popen(argv(self.port), stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})})

    def wait_ready(self) -> None:
        """Blocks until it responds. Raises RuntimeError where it ends first, as it does where its port is taken."""
        while self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._listens() and self.request("GET", self._health)[0] == http.client.OK:
                    threading.Thread(target=self._watch, name="child", daemon=True).start()
                    return
            time.sleep(POLL_S)  # in the thread that loads the model: no event loop waits here
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode} before it was ready")

    def request(
        self, method: str, path: str, body: bytes = b"", kind: str = "", cancel: Cancel | None = None
    ) -> tuple[int, bytes]:
        """Status and body of its response. Blocks.

        Raises OSError, http.client.HTTPException, and CancelledWorkError, having closed the connection.
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
        """End it, with all its threads; blocks for `GRACE_S` at most."""
        self._closing = True
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listens(self) -> bool:
        """Is it the one that listens on its port, alone? Raises OSError."""
        rows = [line.split() for line in SOCKETS.read_text().splitlines()[1:]]
        listening = {row[9] for row in rows if row[3] == LISTEN and row[1].endswith(f":{self.port:04X}")}
        own = {str(link.readlink()) for link in Path(f"/proc/{self._process.pid}/fd").iterdir()}
        return bool(listening) and all(f"socket:[{inode}]" in own for inode in listening)

    def _watch(self) -> None:
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
