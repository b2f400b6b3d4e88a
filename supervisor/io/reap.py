"""One daemon per state directory; at its start it kills what an earlier one left running.

Workers are recognised by marks in their environment, which every descendant inherits. A program that overwrites its
environment to change its title (vLLM's engine does) is still recognised by its output, which goes to a worker's log file.
Processes are signalled only through a pidfd, after their start time and mark were read again once it was open; so a
reused pid can't get a signal meant for another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from supervisor.errors import LlmuxError
from supervisor.io import cgroup, files, procfs
from supervisor.io.procfs import Proc, processes

INSTANCE_VARIABLE = "LLMUX_INSTANCE"
WORKER_VARIABLE = "LLMUX_WORKER"


@dataclass(frozen=True, slots=True)
class Mark:
    """What the processes of an instance, or of one of its workers, have in common."""

    instance: str
    worker: str | None = None  # "model:generation"; None: every worker
    logs: Path | None = None  # the worker's log file, or the directory of all of them

    def environment(self) -> dict[str, str]:
        """The variables that mark a process."""
        worker = {} if self.worker is None else {WORKER_VARIABLE: self.worker}
        return {INSTANCE_VARIABLE: self.instance, **worker}

    def on(self, pid: int) -> bool:
        """Does this process carry it? False where that can't be read."""
        environment = procfs.environment(pid)
        if any(entry.startswith(f"{INSTANCE_VARIABLE}=".encode()) for entry in environment):
            return all(f"{name}={value}".encode() in environment for name, value in self.environment().items())
        return self.logs is not None and any(_is_log(target, self.logs) for target in procfs.open_files(pid, 1, 2))


def worker_of(pid: int) -> str | None:
    """The worker ("model:generation") that a process belongs to; None: unknown, or to none."""
    marks = (entry.partition(b"=") for entry in procfs.environment(pid))
    return next((os.fsdecode(value) for name, _, value in marks if name == WORKER_VARIABLE.encode()), None)


def _is_log(target: str, logs: Path) -> bool:
    path = target.removesuffix(" (deleted)")
    return path in (str(logs), f"{logs}.1") or path.startswith(f"{logs}/")


def marked(mark: Mark) -> list[Proc]:
    """The living processes that carry the mark, except this one and its ancestors."""
    table = {proc.pid: proc for proc in processes()}
    spared, pid = set(), os.getpid()
    while pid in table:
        spared.add(pid)
        pid = table[pid].parent
    return [proc for pid, proc in table.items() if pid not in spared and proc.alive and mark.on(pid)]


def open_same(proc: Proc, mark: Mark) -> int | None:
    """A pidfd of exactly this process; None when it is gone, its pid was reused, or it lost the mark."""
    try:
        pidfd = os.pidfd_open(proc.pid)
    except OSError:
        return None
    now = Proc.read(proc.pid)
    if now is not None and now.started == proc.started and mark.on(proc.pid):
        return pidfd
    os.close(pidfd)
    return None


class Hunt:
    """Kills all that carry a mark, round by round, until the last of them is gone.

    A dying process loses its environment, and with it the mark, before it frees its memory and files. So each one found is
    held by a pidfd, which becomes readable only when the process is dead.
    """

    def __init__(self, mark: Mark, groups: Iterable[Path] = ()) -> None:
        self._mark = mark
        self._groups = tuple(groups)
        self._held: dict[tuple[int, int], int] = {}  # pid and start time → pidfd
        self.commands: dict[int, str] = {}  # of all that were found

    def round(self, wait_s: float) -> bool:
        """SIGKILL all, then wait at most `wait_s` until they are gone. False: none was left. Blocks."""
        for group in self._groups:
            cgroup.kill(group)
        for proc in marked(self._mark):
            key = proc.pid, proc.started
            if key not in self._held and (pidfd := open_same(proc, self._mark)) is not None:
                self._held[key] = pidfd
                self.commands[proc.pid] = procfs.command(proc.pid)  # the dead have none
        found = bool(self._held)
        for pidfd in self._held.values():
            with contextlib.suppress(OSError):  # dead, or another user's by now
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._wait(time.monotonic() + wait_s)
        return found

    def _wait(self, deadline: float) -> None:
        poller = select.poll()
        for pidfd in self._held.values():
            poller.register(pidfd, select.POLLIN)
        while self._held:
            ready = {pidfd for pidfd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if not ready:
                return
            for key, pidfd in list(self._held.items()):
                if pidfd in ready:
                    poller.unregister(pidfd)
                    os.close(self._held.pop(key))

    @property
    def surviving(self) -> frozenset[int]:
        """Pids that were signalled and live."""
        return frozenset(pid for pid, _ in self._held)

    def close(self) -> None:
        """Give the pidfds back. Harmless when repeated."""
        while self._held:
            os.close(self._held.popitem()[1])


@dataclass(frozen=True, slots=True)
class Reaped:
    """A leftover of an earlier daemon. `gone` is False when it survived SIGKILL."""

    pid: int
    command: str
    gone: bool


def reap_leftovers(instance_id: str, *, logs: Path | None = None, wait_s: float = 5.0) -> list[Reaped]:
    """Kill every process that an earlier daemon of this instance left, and wait until they are gone.

    Blocks, usually for milliseconds, at most about `wait_s`. Call it under the instance's lock, before the first spawn.
    `logs` is the directory of the workers' log files.
    """
    groups = cgroup.left_behind(instance_id)
    deadline = time.monotonic() + wait_s
    with contextlib.closing(Hunt(Mark(instance_id, logs=logs), groups)) as hunt:
        while hunt.round(0.25) and time.monotonic() < deadline:
            pass
        surviving = hunt.surviving
    for group in groups:
        cgroup.remove(group)
    return [Reaped(pid, command, gone=pid not in surviving) for pid, command in hunt.commands.items()]


@dataclass(frozen=True, slots=True)
class InstanceLock:
    """A state directory that is ours until `close`, here and in a successor that got the descriptor.

    The kernel releases it even after SIGKILL. The id is random, made once for the directory, and marks the processes of
    this instance.
    """

    instance: str
    file: BinaryIO

    @classmethod
    def inherited(cls, descriptor: int) -> Self:
        """The lock that the predecessor held. It belongs to the open file, so it never is anybody else's."""
        file = os.fdopen(descriptor, "r+b", buffering=0)
        instance = os.pread(file.fileno(), 128, 0).decode("ascii", "replace").split()[0]
        return cls(instance, file)

    def sign(self) -> None:
        """Note who holds it. In place, because a rename would lose the lock; a torn file only means a new id."""
        os.pwrite(self.file.fileno(), f"{self.instance} {os.getpid():<10}\n".encode(), 0)

    def close(self) -> None:
        self.file.close()


@contextmanager
def instance_lock(state_dir: Path) -> Iterator[str]:
    """`take_lock` within the block; yields the instance's id."""
    with contextlib.closing(take_lock(state_dir)) as lock:
        yield lock.instance


def take_lock(state_dir: Path) -> InstanceLock:
    """Hold a state directory. Raises LlmuxError when another daemon holds it, or it can't be written."""
    path = state_dir / "instance.lock"
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(0o600)
        file = path.open("r+b", buffering=0)
        is_ours = files.lock(file)
    except OSError as error:
        raise LlmuxError(f"the state directory {state_dir} can't be used: {error}", code="state_dir") from error
    words = file.read(128).decode("ascii", "replace").split()
    known, pid = words if len(words) == 2 else (None, "unknown")
    if not is_ours:
        file.close()
        raise LlmuxError(
            f"another llmux (pid {pid}) runs on {state_dir}: stop it, or choose another state directory",
            code="state_dir_in_use",
        )
    lock = InstanceLock(known or secrets.token_hex(8), file)
    lock.sign()
    return lock
