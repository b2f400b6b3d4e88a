"""Limits for clients that send their body, or read their answer, too slowly.

Only the time in which the server waits for the client counts; so a slow stream, whose client waits for the server, is never cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

from supervisor.errors import LlmuxError

_ACKED_AT: Final = 120  # tcpi_bytes_acked in struct tcp_info
_INFO_BYTES: Final = 128


class RequestTimeoutError(LlmuxError):
    """The client began a request and did not finish its head or its body in time."""

    status = HTTPStatus.REQUEST_TIMEOUT
    type = "invalid_request_error"
    code = "request_timeout"


class SlowSender:
    """Checks the rate of one body, which began to arrive at `now`, window by window. The owner adds to `received`."""

    def __init__(self, now: float, *, window_s: float, bytes_per_s: float, limit_s: float) -> None:
        self.received = 0  # in this window
        self._window_s = window_s
        self._bytes_per_s = bytes_per_s
        self._limit_s = limit_s
        self._since = self._window_since = now

    @property
    def next_at(self) -> float:
        """The time for the next call of `refused`."""
        return min(self._window_since + self._window_s, self._since + self._limit_s)

    def refused(self, now: float, *, we_are_slow: bool) -> RequestTimeoutError | None:
        """The error for a body that is too slow. `we_are_slow`: the server doesn't read at the moment."""
        if now - self._since >= self._limit_s:
            return RequestTimeoutError(
                f"The request's body was not complete after {self._limit_s:g} s (limits.body_s)."
            )
        if we_are_slow or now - self._window_since >= self._window_s:
            if not we_are_slow and self.received <= self._bytes_per_s * self._window_s:
                return RequestTimeoutError(
                    f"The request's body came more slowly than {self._bytes_per_s:g} bytes a second "
                    "(limits.least_bytes_per_s)."
                )
            self._window_since, self.received = now, 0
        return None


class SlowReader:
    """Cuts the connection of a slow reader. Between `paused` and `resumed`, the server waits for the client.

    The kernel counts the bytes that the client has received, so a chunk causes no work here.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, *, window_s: float, bytes_per_s: float
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._window_s = window_s
        self._bytes_per_s = bytes_per_s
        self._timer: asyncio.TimerHandle | None = None
        self._paused_at: float | None = None
        self._waited_s = 0.0  # in this window, before `_paused_at`
        self._acked: int | None = 0  # when the window began

    def paused(self) -> None:
        """The write buffer is full: the server now waits for the client."""
        self._paused_at = self._loop.time()
        if self._timer is None:
            self._begin_window()

    def resumed(self) -> None:
        """The client has read enough."""
        if self._paused_at is not None:
            self._waited_s += self._loop.time() - self._paused_at
            self._paused_at = None

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin_window(self) -> None:
        self._waited_s = 0.0
        self._acked = bytes_read(self._transport)
        self._timer = self._loop.call_later(self._window_s, self._check_rate)

    def _check_rate(self) -> None:
        self._timer = None
        if self._paused_at is None:
            return
        now = self._loop.time()
        waited_s = self._waited_s + now - self._paused_at
        acked = bytes_read(self._transport)
        if acked is None or self._acked is None:
            is_slow = self._waited_s == 0.0  # it read nothing in the whole window
        else:
            is_slow = acked - self._acked <= self._bytes_per_s * waited_s
        if is_slow:
            reset(self._transport)  # otherwise the kernel would keep megabytes and go on sending them
            return
        self._paused_at = now
        self._begin_window()


def reset(transport: asyncio.Transport) -> None:
    """Reset a connection, so that its client can't take an incomplete answer for a complete one."""
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def resume_reading(flow: FlowControl, transport: asyncio.Transport) -> None:
    """See `Disconnect`."""
    if not transport.is_closing():
        flow.resume_reading()


def read_while_blocked(flow: FlowControl, transport: asyncio.Transport) -> int | None:
    """See `Disconnect`."""
    return None if transport.is_closing() or not flow.write_paused else bytes_read(transport)


def bytes_read(transport: asyncio.Transport) -> int | None:
    """The bytes that the client's kernel has received; once its buffers are full, those that the client has read.

    None: this machine's kernel doesn't report the number.
    """
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (acked,) = struct.unpack_from("Q", info, _ACKED_AT)
    except (OSError, struct.error):
        return None
    return int(acked)
