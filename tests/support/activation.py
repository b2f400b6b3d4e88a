"""systemd's part of the protocol with a service: sockets that it gives, and what it is told."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.support.daemon import REPOSITORY, Daemon

PATIENCE_S = 60.0
GIVEN = """
import os, sys
for number, given in enumerate(sys.argv[2:]):
    os.dup2(int(given), 3 + number)
    os.close(int(given))
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "supervisor.cli", "serve", "--config", sys.argv[1]])
"""


class Activated(Daemon):
    """A daemon that is given sockets, as by systemd: they get the numbers from 3 on."""

    def activate(self, *sockets: socket.socket, stored: dict[str, list[int]] | None = None) -> Activated:
        """Start it. `stored`: what an earlier one left to systemd, by name."""
        self.config_path.write_text(yaml.safe_dump(self.config))
        names = {given.fileno(): "llmux.socket" for given in sockets}
        names |= {number: name for name, kept in (stored or {}).items() for number in kept}
        # Nothing else may be there under the numbers that they get.
        moved = [fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in names]
        command = [sys.executable, "-c", GIVEN, str(self.config_path), *map(str, moved)]
        env = {
            **os.environ,
            "LISTEN_FDS": str(len(moved)),
            "LISTEN_FDNAMES": ":".join(names.values()),
            "XDG_RUNTIME_DIR": str(self.folder),
            **self.env,
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=REPOSITORY, pass_fds=moved, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        for number in moved:
            os.close(number)
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
        self.stored: dict[str, list[int]] = {}  # descriptors by name
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(PATIENCE_S)

    def expect(self, line: str) -> float:
        """Wait for a datagram with this line; when it came. What is stored or removed meanwhile is."""
        while True:
            data, descriptors, _flags, _address = socket.recv_fds(self.socket, 4096, 16)
            lines = data.decode().split("\n")
            self._keep(lines, descriptors)
            if line in lines:
                return time.monotonic()

    def look(self) -> None:
        """Take what is there."""
        self.socket.setblocking(False)
        try:
            self.expect("nothing")
        except BlockingIOError:
            self.socket.settimeout(PATIENCE_S)

    def _keep(self, lines: list[str], descriptors: list[int]) -> None:
        name = next((line.removeprefix("FDNAME=") for line in lines if line.startswith("FDNAME=")), "")
        if "FDSTORE=1" in lines:
            self.stored.setdefault(name, []).extend(descriptors)
            return
        for descriptor in descriptors:  # of a barrier
            os.close(descriptor)
        if "FDSTOREREMOVE=1" in lines:
            for descriptor in self.stored.pop(name, []):
                os.close(descriptor)

    def fill(self) -> None:
        """Leave no room for a message, whoever sends it."""
        sent = 1
        while sent:  # a sender's own limit can be less than the room that there is
            sent = self._sent_by_one()

    def _sent_by_one(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect(self.socket.getsockname())
            with contextlib.suppress(BlockingIOError):
                for sent in itertools.count():
                    sender.send(b"")
        return sent

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
