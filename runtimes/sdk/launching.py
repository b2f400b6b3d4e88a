"""Start another project's server within its own interpreter, with what must not stand in its command line.

Every user of the machine can read a process's arguments, but only its own user its environment: the key comes in a variable,
and is added to `sys.argv` once the program runs. Such servers log what they were told, key included, so it is taken out of
what this process prints. Imports nothing but the standard library, since the environment is the
server's own.
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast

KEY_VARIABLE = "LLMUX_WORKER_KEY"


def take_key() -> str:
    """The worker's key, which is then in no variable that the server could tell or hand on, and in nothing it prints."""
    key = os.environ.pop(KEY_VARIABLE)
    hide(key)
    return key


def hide(secret: str) -> None:
    """From now on this process prints `***` in its place."""
    sys.stdout, sys.stderr = (cast("TextIO", _Discreet(stream, secret)) for stream in (sys.stdout, sys.stderr))


class _Discreet:
    """A stream that never shows the secret. All else is the stream's own."""

    def __init__(self, stream: TextIO, secret: str) -> None:
        self._stream, self._secret = stream, secret

    def write(self, text: str) -> int:
        self._stream.write(text.replace(self._secret, "***"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def option(name: str) -> str:
    """The value of one of our arguments."""
    return sys.argv[sys.argv.index(name) + 1]


def check_port(host: str, port: int) -> None:
    """Exits with 1 where somebody else listens: some servers take another port then, where nobody would find them."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            sys.stderr.write(f"couldn't bind HTTP server socket, hostname: {host}, port: {port}: {error}\n")
            sys.exit(1)


def run(module: str, words: Sequence[str]) -> None:
    """The module as `python -m` runs it, with these arguments. What it forks or spawns finds it under its own name."""
    gc.enable()  # `bootstrap` disabled it
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
