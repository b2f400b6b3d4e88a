"""systemd's part of the protocol with a service: sockets that it gives, and what it is told."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import yaml

from tests.support import forker
from tests.support.daemon import REPOSITORY, Daemon

PATIENCE_S = 60.0


class Activated(Daemon):
    """A daemon that is given sockets, as by systemd: they get the numbers from 3 on."""

    def activate(self, *sockets: socket.socket) -> Activated:
        self.config_path.write_text(yaml.safe_dump(self.config))
        env = {
            **os.environ,
            "LISTEN_FDS": str(len(sockets)),
            "LISTEN_FDNAMES": ":".join("llmux.socket" for _ in sockets),
            "XDG_RUNTIME_DIR": str(self.folder),
            **self.env,
        }
        argv = ["-m", "tests.support.activated", "serve", "--config", str(self.config_path)]
        ours, theirs = socket.socketpair()
        with self.log_path.open("ab") as log, ours, theirs:
            socket.send_fds(ours, [b"\0"], [given.fileno() for given in sockets])
            self.process = forker.start(argv, cwd=REPOSITORY, env=env, stdin=theirs, stdout=log, stderr=log)
        if sockets[0].family in {socket.AF_INET, socket.AF_INET6}:
            self.port = sockets[0].getsockname()[1]
        return self


def listening(address: str, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(address if family == socket.AF_UNIX else (address, 0))
    listener.listen(16)
    return listener


class Systemd:
    """The other end of NOTIFY_SOCKET, `notify` in this folder."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(PATIENCE_S)

    def expect(self, line: str) -> float:
        """Wait for a datagram with this line; when it came."""
        while line not in self.socket.recv(4096).decode().split("\n"):
            pass
        return time.monotonic()

    def silent_for(self, seconds: float) -> bool:
        self.socket.settimeout(seconds)
        try:
            self.socket.recv(4096)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(PATIENCE_S)
        return False

    def drain(self) -> None:
        self.socket.setblocking(False)
        try:
            while True:
                self.socket.recv(4096)
        except BlockingIOError:
            self.socket.settimeout(PATIENCE_S)
