"""Tells systemd the daemon's state, by sd_notify(3), and takes what it gave, by sd_listen_fds(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import BinaryIO, Final, NamedTuple

FIRST_FD: Final = 3
PARKED: Final = "parked-"
"""How the names begin of what a daemon leaves to its successor."""
_PATIENCE_S: Final = 1.0
"""systemd reads each message at once, but few fit into its queue."""


def notify(*lines: str) -> None:
    """Send these lines, such as `READY=1`. Silent when nobody listens; never blocks."""
    with contextlib.suppress(OSError):
        _send("\n".join(lines))


def _send(text: str, descriptors: Sequence[int] = (), *, within_s: float = 0.0) -> None:
    """Raises OSError where it is not sent within that time, though somebody should listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(within_s)
        sender.connect(name)
        socket.send_fds(sender, [text.encode()], list(descriptors))


def is_supervised() -> bool:
    """Does somebody wait to hear that we are ready? Then nobody reads what we print."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def reloading() -> None:
    """A reload begins; `READY=1` ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(within_s: float) -> None:
    """Shutdown begins and may take this long; otherwise the unit's TimeoutStopSec counts, which ignores our settings."""
    notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")


def _watchdog_interval_s() -> float | None:
    """The interval of `WATCHDOG=1`, half of what systemd allows; None when it doesn't watch us."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    return int(limit_us) / 2e6 if limit_us.isdecimal() and int(limit_us) > 0 else None


async def feed_watchdog() -> None:
    """Tell systemd that the event loop runs, as often as it wants to hear it."""
    interval_s = _watchdog_interval_s()
    while interval_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)


class Parked(NamedTuple):
    """A request that a predecessor left to systemd."""

    connection: socket.socket  # the client's
    file: BinaryIO  # what the client sent


@dataclass(frozen=True, slots=True)
class Given:
    """What systemd started us with. `listeners`: the sockets that it bound for us (socket activation), if it did."""

    listeners: tuple[socket.socket, ...] = ()
    parked: tuple[Parked, ...] = ()


def given() -> Given:
    """Take what systemd gave us, once.

    Raises ValueError for what can't be served: a socket that isn't TCP. A unix socket would be reached through another
    program, so its own address says nothing about who can reach it.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return Given()
    listeners: list[int] = []
    parked: dict[str, list[int]] = {}
    for descriptor, name in zip_longest(range(FIRST_FD, FIRST_FD + int(count)), names[: int(count)], fillvalue=""):
        assert isinstance(descriptor, int)
        os.set_inheritable(descriptor, False)
        (parked.setdefault(str(name), []) if str(name).startswith(PARKED) else listeners).append(descriptor)
    with contextlib.suppress(OSError):
        for name in parked:  # or else systemd would hold the connections open for ever
            _send(f"FDSTOREREMOVE=1\nFDNAME={name}", within_s=_PATIENCE_S)
    return Given(tuple(map(_listener, listeners)), tuple(filter(None, map(_parked, parked.values()))))


def _listener(descriptor: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    is_tcp = listener.family in {socket.AF_INET, socket.AF_INET6} and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ValueError(
            "systemd gave something that is no listening TCP socket: its unit needs ListenStream=HOST:PORT."
        )
    listener.setblocking(False)
    return listener


def _parked(descriptors: list[int]) -> Parked | None:
    """None: systemd let go of the connection, because the client had gone."""
    sockets = [descriptor for descriptor in descriptors if stat.S_ISSOCK(os.fstat(descriptor).st_mode)]
    others = [descriptor for descriptor in descriptors if descriptor not in sockets]
    if len(sockets) != 1 or len(others) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    connection, file = socket.socket(fileno=sockets[0]), os.fdopen(others[0], "rb")
    connection.setblocking(False)
    file.seek(0)
    return Parked(connection, file)


def store(name: str, *descriptors: int) -> None:
    """Have systemd keep copies of these for whoever it starts in our place; it drops them when the unit stops for good.

    Blocks while systemd's queue is full. Raises OSError, TimeoutError after a second of that.
    """
    _send(f"FDSTORE=1\nFDNAME={name}", descriptors, within_s=_PATIENCE_S)


def barrier(within_s: float = 5.0) -> None:
    """Until systemd has read all that was sent: once we have ended it can't tell whose words they were. Blocks."""
    reader, writer = os.pipe()
    try:
        with contextlib.suppress(OSError):
            _send("BARRIER=1", (writer,), within_s=within_s)
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb"), select.epoll() as polled:
        polled.register(reader, 0)  # its other end is closed
        polled.poll(within_s)


def will_restart() -> bool:
    """Does systemd stop our unit only to start it again? Blocks for some milliseconds."""
    unit, manager = os.environ.get("LLMUX_UNIT"), os.environ.get("NOTIFY_SOCKET", "")
    if not unit or not manager:
        return False
    whose = [] if manager == "/run/systemd/notify" else ["--user"]
    command = ["systemctl", *whose, "list-jobs", "--no-legend", "--plain", unit]
    try:
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(line.split()[1:3] == [unit, "restart"] for line in told.stdout.splitlines())
