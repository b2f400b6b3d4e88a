"""Tells systemd the daemon's state, by sd_notify(3), and takes the sockets that systemd passes, by sd_listen_fds(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Final

FIRST_FD: Final = 3


def notify(*lines: str) -> None:
    """Send these lines, such as `READY=1`. Silent when nobody listens; never blocks."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto("\n".join(lines).encode(), name)


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


def systemd_sockets() -> tuple[socket.socket, ...]:
    """Take the sockets that systemd bound for us (socket activation), once; none where it didn't.

    Raises ValueError for a socket that can't be served, because it isn't TCP. A unix socket would be reached through another
    program, so its own address says nothing about who can reach it.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return ()
    return tuple(map(_listener_from, range(FIRST_FD, FIRST_FD + int(count))))


def _listener_from(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)
    listener = socket.socket(fileno=descriptor)
    is_tcp = listener.family in {socket.AF_INET, socket.AF_INET6} and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ValueError(
            "systemd gave something that is no listening TCP socket: its unit needs ListenStream=HOST:PORT."
        )
    listener.setblocking(False)
    return listener
