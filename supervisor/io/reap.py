"""Nothing is left behind: one daemon per state directory, and what an earlier one could not clean up is killed at boot.

Workers are recognised by markers in their environment, which every descendant inherits. A program that overwrites its
environment to change its title (vLLM's engine does) is still recognised by its output: it goes to a worker's log file.
A process is only ever signalled through a pidfd, after its start time and its marker were read again *behind* the open
pidfd; so a reused pid can't get a signal meant for another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from supervisor.errors import LlmuxError
from supervisor.io import cgroup

INSTANCE_VARIABLE = "LLMUX_INSTANCE"
WORKER_VARIABLE = "LLMUX_WORKER"

_PF_EXITING = 0x4  # of the kernel's task flags


@dataclass(frozen=True, slots=True)
class Proc:
    """One process at one moment. `started` (clock ticks since boot) tells it from others that had its pid."""

    pid: int
    parent: int
    session: int
    state: str
    threads: int
    started: int
    flags: int

    @property
    def alive(self) -> bool:
        """False for a zombie; true while any thread runs, even when the first one has ended (state Z)."""
        return self.state not in "ZX" or self.threads > 1

    @property
    def dying(self) -> bool:
        """Its first thread has begun to end, or has ended: what marks it may be gone before its memory is."""
        return bool(self.flags & _PF_EXITING)

    @classmethod
    def read(cls, pid: int) -> Proc | None:
        """None when there is no such process."""
        try:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  a hot scan
                fields = file.read(4096).rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return cls(
            pid, int(fields[1]), int(fields[3]), chr(fields[0][0]), int(fields[17]), int(fields[19]), int(fields[6])
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """What the processes of an instance, or of one of its workers, have in common."""

    instance: str
    worker: str | None = None  # "model:generation"; None: every worker
    logs: Path | None = None  # the worker's log file, or the directory of all of them

    def environment(self) -> dict[str, str]:
        """The variables that make a process carry this mark."""
        worker = {} if self.worker is None else {WORKER_VARIABLE: self.worker}
        return {INSTANCE_VARIABLE: self.instance, **worker}

    def on(self, pid: int) -> bool:
        """Does this process carry it? False for processes that can't be looked into."""
        environment = _environment(pid)
        if any(entry.startswith(f"{INSTANCE_VARIABLE}=".encode()) for entry in environment):
            return all(f"{name}={value}".encode() in environment for name, value in self.environment().items())
        return self.logs is not None and any(_is_log(_link(f"/proc/{pid}/fd/{fd}"), self.logs) for fd in (1, 2))


def worker_of(pid: int) -> str | None:
    """The worker ("model:generation") that a process belongs to; None: it can't be told, or to none."""
    marks = (entry.partition(b"=") for entry in _environment(pid))
    return next((os.fsdecode(value) for name, _, value in marks if name == WORKER_VARIABLE.encode()), None)


def _environment(pid: int) -> frozenset[bytes]:
    for folder in _threads(pid):
        try:
            with open(f"{folder}/environ", "rb", buffering=0) as file:  # noqa: PTH123  a hot scan
                if found := file.readall():
                    return frozenset(found.split(b"\0"))
        except OSError:
            continue
    return frozenset()


def _threads(pid: int) -> Iterator[str]:
    yield f"/proc/{pid}"
    # Where the first thread has ended, /proc/PID shows no environment, but the other threads do.
    proc = Proc.read(pid)
    if proc and proc.state == "Z" and proc.threads > 1:
        with contextlib.suppress(OSError):
            for tid in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  names are enough
                yield f"/proc/{pid}/task/{tid}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115  a hot scan
    except OSError:
        return ""


def _is_log(target: str, logs: Path) -> bool:
    path = target.removesuffix(" (deleted)")
    return path in (str(logs), f"{logs}.1") or path.startswith(f"{logs}/")


def processes() -> list[Proc]:
    """Every process visible here, zombies too. A few milliseconds for a few hundred."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  names are enough
    return [proc for pid in pids if (proc := Proc.read(pid))]


def marked(mark: Mark) -> list[Proc]:
    """The living processes that carry the mark, without ourselves and our ancestors."""
    table = {proc.pid: proc for proc in processes()}
    spared, pid = set(), os.getpid()
    while pid in table:
        spared.add(pid)
        pid = table[pid].parent
    return [proc for pid, proc in table.items() if pid not in spared and proc.alive and mark.on(pid)]


def open_same(proc: Proc, mark: Mark) -> int | None:
    """A pidfd of exactly this process, or None when it is gone, its pid is another's now, or it lost the mark."""
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

    A dying process loses its environment, and with it the mark, before it lets go of its memory and files. So each one
    that was seen is held by a pidfd, which only fires when it is really dead.
    """

    def __init__(self, mark: Mark, groups: Iterable[Path] = ()) -> None:
        self._mark = mark
        self._groups = tuple(groups)
        self._held: dict[Proc, int] = {}
        self.commands: dict[int, str] = {}  # of all that were ever seen

    def round(self, wait_s: float) -> bool:
        """SIGKILL to all, then wait until they are gone, at most `wait_s`. False: there was nobody any more. Blocks."""
        for group in self._groups:
            cgroup.kill(group)
        for proc in marked(self._mark):
            if all((proc.pid, proc.started) != (held.pid, held.started) for held in self._held):
                pidfd = open_same(proc, self._mark)
                if pidfd is not None:
                    self._held[proc] = pidfd
                    self.commands[proc.pid] = _command(proc.pid)  # the dead don't tell
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
            for proc, pidfd in list(self._held.items()):
                if pidfd in ready:
                    poller.unregister(pidfd)
                    os.close(self._held.pop(proc))

    @property
    def surviving(self) -> frozenset[int]:
        """Pids that were signalled and aren't dead yet."""
        return frozenset(proc.pid for proc in self._held)

    def close(self) -> None:
        """Give the pidfds back. Harmless when repeated."""
        while self._held:
            os.close(self._held.popitem()[1])


@dataclass(frozen=True, slots=True)
class Reaped:
    """A leftover of an earlier daemon. `gone` is false when it survived SIGKILL for the whole wait."""

    pid: int
    command: str
    gone: bool


def reap_leftovers(instance_id: str, *, logs: Path | None = None, wait_s: float = 5.0) -> list[Reaped]:
    """Kill every process that an earlier daemon of this instance left, and wait until they are gone.

    For boot: blocks, usually for milliseconds, at most about `wait_s`. Call it under the instance's lock, before the
    first spawn. `logs` is the directory of the workers' log files.
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


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return os.fsdecode(b" ".join(words) or Path(f"/proc/{pid}/comm").read_bytes().rstrip())
    except OSError:
        return "?"


class InstanceLock:
    """Holds a state directory for one daemon, as long as it lives; the kernel lets go even after SIGKILL.

    `instance_id` is random, made once for the directory, and marks the processes of this instance.
    """

    def __init__(self, state_dir: Path) -> None:
        """Raises LlmuxError when another daemon holds the directory or it can't be written."""
        path = state_dir / "instance.lock"
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LlmuxError(f"the state directory {state_dir} can't be used: {error}", code="state_dir") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _, pid = self._read()
            os.close(self._fd)
            raise LlmuxError(
                f"another llmux (pid {pid or 'unknown'}) runs on {state_dir}: stop it, or choose another state directory",
                code="state_dir_in_use",
            ) from error
        instance_id, _ = self._read()
        self.instance_id = instance_id or secrets.token_hex(8)
        # Short and in place: one small write; a torn file only means a new id, and no rename can lose the lock.
        os.pwrite(self._fd, f"{self.instance_id} {os.getpid():<10}\n".encode(), 0)

    def _read(self) -> tuple[str, str]:
        words = os.pread(self._fd, 128, 0).decode("ascii", "replace").split()
        return (words[0], words[1]) if len(words) == 2 else ("", "")

    def release(self) -> None:
        """Let another daemon have it. Harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
