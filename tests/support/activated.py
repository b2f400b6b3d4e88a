"""A daemon that is given sockets, as by systemd. They come by the socket that is its stdin, since the forker gives no more."""

from __future__ import annotations

import os
import runpy
import socket
import sys

MOST = 16
MODULE = "supervisor.cli"


def take_sockets() -> None:
    """They get the numbers from 3 on, where nothing is in a forked process; stdin is then empty."""
    with socket.socket(fileno=os.dup(0)) as end:
        number = end.fileno()
        _, given, _, _ = socket.recv_fds(end, 1, MOST)
    assert given == [*range(number + 1, number + 1 + len(given))], given
    for at, descriptor in enumerate(given):
        os.dup2(descriptor, 3 + at)
    os.close(given[-1])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ["LISTEN_PID"] = str(os.getpid())


if __name__ == "__main__":
    take_sockets()
    sys.orig_argv[1:3] = ["-m", MODULE]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
