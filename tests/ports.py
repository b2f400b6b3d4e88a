"""Ports for daemons and workers under test: out of the way of connections, of one another and of other test runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_FIRST, _BLOCK, _BLOCKS = 20_000, 100, 120  # below those that the kernel gives to connections
_numbers = itertools.count(os.getpid())


def quiet_ports(count: int = 1) -> int:
    """The first of up to 100 ports in a row that nobody uses. Others each time; test runs beside this one begin elsewhere."""
    assert count <= _BLOCK
    for number in itertools.islice(_numbers, _BLOCKS):
        first = _FIRST + number % _BLOCKS * _BLOCK
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise AssertionError("no quiet ports")
