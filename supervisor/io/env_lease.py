"""Who runs from a runtime's environment: an environment that somebody uses is never removed.

A worker imports and loads libraries for as long as it lives, so the files it was started from have to stay. Whoever starts
one takes a shared lock on the environment's record and hands the open file on: to the shim and, by inheritance, to the
worker. The kernel lets go when the last of them is dead, however they die; nothing has to be written down or tidied up.
Who wants to remove an environment needs the lock alone, and takes the record away first: what has no record is nobody's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from supervisor.io import files, procfs
from supervisor.io.reap import worker_of

STORE: Final = ".envs"
RECORD: Final = "llmux.json"  # written last: an environment without it isn't complete


class EnvironmentGoneError(Exception):
    """It was removed just now; there may be a new one."""


class EnvLease:
    """A share in an environment, which also those processes have that inherit `fd`."""

    def __init__(self, environment: Path, fd: int) -> None:
        self.environment = environment
        self.fd = fd

    @classmethod
    def on(cls, program: str) -> Self | None:
        """A share in the environment that a program lies in; None: it is in none of ours.

        Waits for those who are removing it. Raises EnvironmentGoneError.
        """
        if not Path(program).is_absolute():
            return None
        try:
            environment = Path(program).parents[1].resolve(strict=True)
            if environment.parents[1].name != STORE:
                return None
        except (OSError, IndexError):
            return None
        try:
            fd = os.open(environment / RECORD, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if is_replaced(environment):  # its record is away, and soon the rest of it
                raise EnvironmentGoneError(str(environment)) from error
            return None
        lease = cls(environment, fd)
        try:
            files.lock(fd, shared=True, wait=True)
            kept = os.path.samestat(os.fstat(fd), (environment / RECORD).stat())
        except FileNotFoundError:
            kept = False
        except OSError:  # a file system without locks: there nobody gets one to remove it, either
            kept = True
        if not kept:
            lease.close()
            raise EnvironmentGoneError(str(environment))
        return lease

    def close(self) -> None:
        """Give the share back; harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def is_replaced(environment: Path) -> bool:
    """Has another been installed since, or this one been removed?"""
    return live(environment.parent).resolve() != environment


def live(builds: Path) -> Path:
    """The link to the one that new workers get, of all environments of a runtime."""
    return builds.parents[1] / builds.name


@contextmanager
def alone(environment: Path) -> Iterator[bool]:
    """Is it nobody's? If so it stays so within the block, and ever after: its record is taken away."""
    try:
        file = (environment / RECORD).open("r+b")
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    with file:
        try:
            ours = files.lock(file)
            if ours:
                (environment / RECORD).unlink()
        except OSError:
            ours = False
        yield ours


def in_use(environment: Path) -> bool:
    """Does anybody have a share in it?"""
    try:
        with (environment / RECORD).open("r+b") as file:
            return not files.lock(file)
    except OSError:
        return False


def models(environment: Path) -> tuple[str, ...]:
    """The models whose workers have a share in it, as far as their processes can be looked into. Blocks for milliseconds."""
    record = str(environment / RECORD)
    holders = [proc.pid for proc in procfs.processes() if record in procfs.open_files(proc.pid)]
    return tuple(sorted({worker.rpartition(":")[0] for pid in holders if (worker := worker_of(pid)) is not None}))
