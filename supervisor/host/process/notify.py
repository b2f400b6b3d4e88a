"""Reports the daemon's state to systemd, by sd_notify(3), and takes sockets from systemd, by sd_listen_fds(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Final

FIRST_FD: Final = 3


def notify(*lines: str) -> None:
    """Send these lines, such as `READY=1`. Does nothing without a listener; never blocks."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto("\n".join(lines).encode(), name)


def is_supervised() -> bool:
    """Does systemd wait for `READY=1`? Then no person reads the output."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def reloading() -> None:
    """Report that a reload begins; `READY=1` reports its end."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(within_s: float) -> None:
    """Report that shutdown begins and may take this long; otherwise the unit's TimeoutStopSec would be the limit."""
    notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")


def _watchdog_interval_s() -> float | None:
    """The interval of `WATCHDOG=1`, half of what systemd allows; None when it doesn't watch us."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    return int(limit_us) / 2e6 if limit_us.isdecimal() and int(limit_us) > 0 else None


async def feed_watchdog() -> None:
    """Report to systemd that the event loop runs, at the interval of its watchdog."""
    interval_s = _watchdog_interval_s()
    while interval_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)


def systemd_sockets() -> tuple[socket.socket, ...]:
    """Take the sockets that systemd bound for us (socket activation), once; empty if there are none.

    Raises ValueError for a socket other than TCP. Clients reach a unix socket through another program, so the socket's own
    address doesn't show which clients can.
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
