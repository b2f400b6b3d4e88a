"""Our ends of a shim: of one that we started, or of one that another daemon handed over."""

from __future__ import annotations

import os
from typing import IO, Protocol


class Shim(Protocol):
    """A shim and our ends of its pipes: a child of ours (`subprocess.Popen`), or an `AdoptedShim`."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self) -> int | None:
        """Collect it once it has ended."""
        ...


class AdoptedShim:
    """A shim that another daemon started and handed over. Its parent, or who inherits it, collects it."""

    def __init__(self, pid: int, stdin: int, stdout: int, pidfd: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.pidfd = pidfd

    def wait(self) -> int | None:
        return None
