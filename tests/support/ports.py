"""Ports for daemons and workers under test: out of the way of connections, and of every other process that runs tests.

A port that is free when it is looked for may be taken when it is used, or between the end of a daemon and its next start.
So each process that runs tests has 1250 ports of its own. What shows that they are taken is the name of a socket, which holds for
all that share these ports, whatever their HOME, and which the kernel gives back when the process ends.
"""

from __future__ import annotations

import contextlib
import socket
from functools import cache

_FIRST, _COUNT = 10_100, 1250  # browsers refuse 10080; the kernel takes 32768 and above for connections
_WORKERS = 18_100  # from here on daemons give their workers ports, where no configuration says otherwise
_SHARES = [first for first in range(_FIRST, 32_768 - _COUNT, _COUNT) if not first <= _WORKERS < first + _COUNT]


def quiet_ports(count: int = 1, *, clean: bool = False) -> int:
    """The first of `count` ports in a row that nobody uses; others each time, until all had their turn.

    For a minute the kernel remembers a port's ended connections: such ports are the second choice, and none where the
    ports must be `clean`.
    """
    share = _own()
    for reuse in [False] if clean else [False, True]:
        for _ in range(_COUNT // count):
            first = share.next(count)
            if _nobody_uses(range(first, first + count), reuse=reuse):
                return first
    raise AssertionError("no quiet ports")


def _nobody_uses(ports: range, *, reuse: bool) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            for port in ports:
                listener = stack.enter_context(socket.socket())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                listener.bind(("", port))
        except OSError:
            return False
    return True


class _Share:
    """The ports of this process, as long as it lives. They are given in turn."""

    def __init__(self, first: int) -> None:
        self._first, self._given = first, 0

    def next(self, count: int) -> int:
        start = self._given if self._given + count <= _COUNT else 0
        self._given = start + count
        return self._first + start


@cache
def _own() -> _Share:
    for number, first in enumerate(_SHARES):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0llmux tests, share {number} of the ports")
        except OSError:
            name.close()
            continue
        name.detach()  # it stays until this process ends
        return _Share(first)
    raise AssertionError(f"{len(_SHARES)} processes run tests already; end some")
