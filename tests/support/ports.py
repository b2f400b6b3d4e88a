"""Ports for daemons and workers under test: out of the way of connections, and of every other process that runs tests.

A port that is free when it is looked for may be taken when it is used, or between the end of a daemon and its next start.
So each process that runs tests has 1250 ports of its own, by a lock that the kernel gives back when it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import socket
from collections.abc import Iterator
from functools import cache
from typing import IO

from tests.support.build_llama_server import CACHE

_FIRST, _BLOCK, _BLOCKS, _SHARES = 10_000, 50, 25, 18  # below 32768, where the kernel's own for connections begin


def quiet_ports(count: int = 1) -> int:
    """The first of up to 50 ports in a row that nobody uses; others each time."""
    assert count <= _BLOCK
    _, blocks = _own()
    for number, first in enumerate(itertools.islice(blocks, 2 * _BLOCKS)):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    listener = stack.enter_context(socket.socket())
                    # The kernel remembers ended connections for a minute: such ports are the second choice.
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, number >= _BLOCKS)
                    listener.bind(("", port))
            except OSError:
                continue
            return first
    raise AssertionError("no quiet ports")


@cache
def _own() -> tuple[IO[bytes], Iterator[int]]:
    """The lock of this process's share, held as long as it lives, and the first ports of its blocks, again and again."""
    folder = CACHE / "ports"
    folder.mkdir(parents=True, exist_ok=True)
    for share in range(_SHARES):
        lock = (folder / str(share)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        first = _FIRST + share * _BLOCKS * _BLOCK
        return lock, itertools.cycle(range(first, first + _BLOCKS * _BLOCK, _BLOCK))
    raise AssertionError(f"{_SHARES} processes run tests already; end some")
