"""Leases on runtimes' environments: an environment that a process uses is never removed.

A worker may import libraries as long as it lives. So the process that starts it takes a shared lock on the environment's record
and passes the open file to the shim and, by inheritance, to the worker. The kernel releases the lock when the last of them has
died. Removing an environment takes the exclusive lock and deletes the record first: without a record there are no leases.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from runtimes.installed import RECORD
from supervisor.host.process import procfs
from supervisor.host.process.reap import worker_of
from supervisor.host.store import files

STORE: Final = ".envs"


class EnvironmentRemovedError(Exception):
    """The environment was just removed; the runtime may have a new one."""


@dataclass(frozen=True, slots=True)
class EnvLease:
    """A lease, shared by every process that inherits `record`. It ends when all have closed `record`."""

    environment: Path
    record: BinaryIO

    @classmethod
    def on(cls, program: str) -> Self | None:
        """A lease on the environment that contains this program; None: the program is in no runtime's environment.

        Waits while another process removes the environment. Raises EnvironmentRemovedError.
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
            record = (environment / RECORD).open("rb")
        except OSError as error:
            if is_replaced(environment):  # it is being removed
                raise EnvironmentRemovedError(str(environment)) from error
            return None
        try:
            files.lock(record, shared=True, wait=True)
            kept = os.path.samestat(os.fstat(record.fileno()), (environment / RECORD).stat())
        except FileNotFoundError:
            kept = False
        except OSError:  # without locks nobody can remove the environment either
            kept = True
        if not kept:
            record.close()
            raise EnvironmentRemovedError(str(environment))
        return cls(environment, record)


def is_replaced(environment: Path) -> bool:
    """Was the environment replaced or removed?"""
    return environment not in live(environment.parent)


def live(builds: Path) -> set[Path]:
    """The runtime's live environments: the current one, and the builds beside it, such as name@b11146."""
    folder, name = builds.parents[1], builds.name
    return {link.resolve() for link in (folder / name, *folder.glob(f"{glob.escape(name)}@*"))}


@contextmanager
def retire(environment: Path) -> Iterator[bool]:
    """Delete the record of an environment that nobody uses, so that nobody can lease it any more; yields whether it was unused."""
    with ExitStack() as opened:
        try:
            ours = files.lock(opened.enter_context((environment / RECORD).open("r+b")))
            if ours:
                (environment / RECORD).unlink()
        except FileNotFoundError:
            ours = True
        except OSError:
            ours = False
        yield ours


def in_use(environment: Path) -> bool:
    """Does any process hold a lease on the environment?"""
    try:
        with (environment / RECORD).open("r+b") as file:
            return not files.lock(file)
    except OSError:
        return False


def models(environment: Path) -> tuple[str, ...]:
    """The models whose workers hold a lease on the environment, as far as this user may see them. Blocks for milliseconds."""
    record = str(environment / RECORD)
    holders = [proc.pid for proc in procfs.processes() if record in procfs.open_files(proc.pid)]
    return tuple(sorted({worker.rpartition(":")[0] for pid in holders if (worker := worker_of(pid)) is not None}))
