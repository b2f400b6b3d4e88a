"""One daemon per state directory; at its start it kills the processes that an earlier one left running.

The instance is the file `instance.lock` itself: its id is made of the file's device and inode, so a copied directory is
another instance, and while a daemon has the file locked, no other file can have this id.

Workers are recognised by marks in their environment, which every descendant inherits. A program that overwrites its
environment to change its title (vLLM's engine does) is still recognised by its output: its shim opened and locked the log
file, and only a process that inherited this open file shows the lock. A process that opens the log by its path doesn't. All
processes below a recognised one belong to it; processes of a living daemon are left alone. Processes are signalled only through
a pidfd. Once it is open, their start time and mark are read again, so no signal reaches another process that reuses the pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from supervisor.errors import LlmuxError
from supervisor.host.process import cgroup, procfs
from supervisor.host.process.procfs import Proc, ProcessTable, processes
from supervisor.host.store import files

INSTANCE_VARIABLE = "LLMUX_INSTANCE"
WORKER_VARIABLE = "LLMUX_WORKER"
LOCK = "instance.lock"


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark that the processes of an instance, or of one of its workers, have in common."""

    instance: str
    worker: str | None = None  # "model:generation"; None: every worker
    logs: Path | None = None  # the worker's log file, or the directory of all of them

    def environment(self) -> dict[str, str]:
        """The variables that mark a process."""
        worker = {} if self.worker is None else {WORKER_VARIABLE: self.worker}
        return {INSTANCE_VARIABLE: self.instance, **worker}

    def on(self, pid: int) -> bool:
        """Does this process carry the mark? False if the process can't be read."""
        environment = procfs.environment(pid)
        if any(entry.startswith(f"{INSTANCE_VARIABLE}=".encode()) for entry in environment):
            return all(f"{name}={value}".encode() in environment for name, value in self.environment().items())
        logs = self.logs
        return logs is not None and procfs.holds_lock(pid, lambda target: _is_log(target, logs), 1, 2)


def worker_of(pid: int) -> str | None:
    """The worker ("model:generation") that a process belongs to; None: none, or unknown."""
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


def open_same(proc: Proc, mark: Mark | None) -> int | None:
    """A pidfd of exactly this process; None: it is gone, its pid was reused, or it lost the mark (if one is given)."""
    try:
        pidfd = os.pidfd_open(proc.pid)
    except OSError:
        return None
    now = Proc.read(proc.pid)
    if now is not None and now.started == proc.started and (mark is None or mark.on(proc.pid)):
        return pidfd
    os.close(pidfd)
    return None


def below_daemon(pid: int) -> bool:
    """Is the process a living daemon of another instance, or below one?"""
    while pid != os.getpid() and (proc := Proc.read(pid)) is not None:
        if procfs.holds_lock(pid, lambda target: target.removesuffix(" (deleted)").endswith(f"/{LOCK}")):
            return True
        pid = proc.parent
    return False


class Hunt:
    """Kills all processes that carry a mark, and all below them, round by round, until all are gone.

    A dying process loses its environment, and with it the mark, before it frees its memory and files. So the hunt opens a
    pidfd of each process found, which becomes readable only when the process is dead.
    """

    def __init__(
        self, mark: Mark, groups: Iterable[Path] = (), spare: Callable[[int], bool] = lambda _pid: False
    ) -> None:
        self._mark = mark
        self._groups = tuple(groups)
        self._spare = spare
        self._pidfds: dict[tuple[int, int], int] = {}  # pid and start time → pidfd
        self.commands: dict[int, str] = {}  # command lines of all processes found

    def round(self, wait_s: float, adopted: Iterable[Proc] = ()) -> bool:
        """SIGKILL all, then wait at most `wait_s` until all are gone. False: none was left. Blocks.

        The processes in `adopted` are killed too, with all below them, even without the mark.
        """
        for group in self._groups:
            cgroup.kill(group)
        roots = {proc.pid: (proc, self._mark) for proc in marked(self._mark)}
        for proc, mark in [*roots.values(), *((proc, None) for proc in adopted if proc.pid not in roots)]:
            self._open_pidfd(proc, mark)
        table = {proc.pid: proc for proc in processes()}
        known = [pid for pid, proc in table.items() if (pid, proc.started) in self._pidfds]
        for pid in ProcessTable({pid: proc.parent for pid, proc in table.items()}).tree(known):
            self._open_pidfd(table[pid], None)
        found = bool(self._pidfds)
        for pidfd in self._pidfds.values():
            with contextlib.suppress(OSError):  # the process is dead, or belongs to another user by now
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._wait_for_exits(time.monotonic() + wait_s)
        return found

    def _open_pidfd(self, proc: Proc, mark: Mark | None) -> None:
        key = proc.pid, proc.started
        if key in self._pidfds or not proc.alive or self._spare(proc.pid):
            return
        if (pidfd := open_same(proc, mark)) is not None:
            self._pidfds[key] = pidfd
            self.commands[proc.pid] = procfs.command(proc.pid)  # a dead process has no command line

    def _wait_for_exits(self, deadline: float) -> None:
        poller = select.poll()
        for pidfd in self._pidfds.values():
            poller.register(pidfd, select.POLLIN)
        while self._pidfds:
            ready = {pidfd for pidfd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if not ready:
                return
            for key, pidfd in list(self._pidfds.items()):
                if pidfd in ready:
                    poller.unregister(pidfd)
                    os.close(self._pidfds.pop(key))

    @property
    def surviving(self) -> frozenset[int]:
        """The pids of processes that survived the signal so far."""
        return frozenset(pid for pid, _ in self._pidfds)

    def close(self) -> None:
        """Close the pidfds. Harmless when repeated."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


@dataclass(frozen=True, slots=True)
class Reaped:
    """A leftover of an earlier daemon. `has_ended` is False when it survived SIGKILL."""

    pid: int
    command: str
    has_ended: bool


def reap_leftovers(instance_id: str, *, logs: Path | None = None, wait_s: float = 5.0) -> list[Reaped]:
    """Kill all processes that an earlier daemon of this instance left, and wait until they are gone.

    Blocks, usually for milliseconds, at most about `wait_s`. Call it under the instance's lock, before the first spawn.
    `logs` is the directory of the workers' log files.
    """
    groups = cgroup.leftover_groups(instance_id)
    deadline = time.monotonic() + wait_s
    mark = Mark(instance_id, logs=None if logs is None else logs.resolve())
    with contextlib.closing(Hunt(mark, groups, below_daemon)) as hunt:
        while hunt.round(0.25) and time.monotonic() < deadline:
            pass
        surviving = hunt.surviving
    for group in groups:
        cgroup.remove(group)
    return [Reaped(pid, command, has_ended=pid not in surviving) for pid, command in hunt.commands.items()]


@dataclass(frozen=True, slots=True)
class InstanceLock:
    """The lock on a state directory, until `close` here and in a successor that got the descriptor.

    The kernel releases it even after SIGKILL. The id marks the processes of this instance.
    """

    instance: str
    file: BinaryIO

    @classmethod
    def inherited(cls, descriptor: int) -> Self:
        """The predecessor's lock. It belongs to the open file, so no other process can have taken it meanwhile."""
        return cls(instance_of(descriptor), os.fdopen(descriptor, "r+b", buffering=0))

    def sign(self) -> None:
        """Write this process into the lock file, in place, because a rename would lose the lock."""
        os.pwrite(self.file.fileno(), f"{self.instance} {os.getpid()}".ljust(64).encode() + b"\n", 0)

    def close(self) -> None:
        self.file.close()


@contextmanager
def instance_lock(state_dir: Path) -> Iterator[str]:
    """`take_lock` within the block; yields the instance's id."""
    with contextlib.closing(take_lock(state_dir)) as lock:
        yield lock.instance


def take_lock(state_dir: Path) -> InstanceLock:
    """Lock a state directory. Raises LlmuxError if another daemon has locked it, or if it isn't writable."""
    path = state_dir / LOCK
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(0o600)
        file = path.open("r+b", buffering=0)
        is_ours = files.lock(file)
    except OSError as error:
        remedy = "make it writable, or name another: --state-dir, server.state_dir or XDG_STATE_HOME"
        message = f"the state directory {state_dir} can't be used: {error.filename}: {error.strerror}; {remedy}"
        raise LlmuxError(message, code="state_dir") from error
    if not is_ours:
        pid = (file.read(128).decode("ascii", "replace").split() or ["unknown"])[-1]
        file.close()
        raise LlmuxError(
            f"another llmux (pid {pid}) runs on {state_dir}: stop it, or choose another state directory",
            code="state_dir_in_use",
        )
    lock = InstanceLock(instance_of(file.fileno()), file)
    lock.sign()
    return lock


def instance_of(lock: int) -> str:
    """The id of the instance with this open lock file."""
    status = os.fstat(lock)
    return f"{status.st_dev:x}-{status.st_ino:x}"
