"""Starts another project's server within its own interpreter, with a key that must not be in the command line.

Every user of the machine can read a process's arguments, but only its own user can read its environment. So the key comes in
a variable, and is added to `sys.argv` once the program runs. Such servers log their arguments, key included, so this process
removes the key from all its output. Imports only the standard library, because the environment is the server's own.
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
    """Take the worker's key out of the environment, so that the server can't hand it on, and hide it in all output."""
    key = os.environ.pop(KEY_VARIABLE)
    hide(key)
    return key


def hide(secret: str) -> None:
    """From now on this process prints `***` in place of the secret."""
    sys.stdout, sys.stderr = (cast("TextIO", _RedactedStream(stream, secret)) for stream in (sys.stdout, sys.stderr))


class _RedactedStream:
    """A stream that never shows the secret; otherwise the wrapped stream."""

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
    """The value of this option among our arguments."""
    return sys.argv[sys.argv.index(name) + 1]


def check_port(host: str, port: int) -> None:
    """Exits with 1 if another process listens there: some servers would take another port, where llmux can't find them."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            sys.stderr.write(f"couldn't bind HTTP server socket, hostname: {host}, port: {port}: {error}\n")
            sys.exit(1)


def run(module: str, words: Sequence[str]) -> None:
    """Run the module like `python -m`, with these arguments. Its child processes find it under its own name."""
    gc.enable()  # `bootstrap` disabled it
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
