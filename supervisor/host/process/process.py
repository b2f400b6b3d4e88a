"""Worker processes on the daemon's side: terminate them, kill them, and confirm that all of their processes are gone.

Each worker runs below a shim (see shim.py), which takes commands on stdin and reports on stdout. `WorkerProcess.wait()`
resolves only when the last process of the tree is dead: the shim reports that once the kernel shows it no children. If the
shim itself is killed, the worker's leader dies by its parent-death signal, and the other processes become the daemon's
children (`become_subreaper`). A hunt kills these: all processes that carry the worker's mark, and all children that the
daemon did not start itself.

Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Final, Protocol

from supervisor.core.types import CrashClass
from supervisor.errors import LlmuxError
from supervisor.host.process import cgroup
from supervisor.host.process.procfs import OUR_OWN_TROUBLE, Proc, ProcessTable, oom_kills, processes
from supervisor.host.process.reap import Hunt, Mark, marked, worker_of

_PR_SET_CHILD_SUBREAPER = 36
_DYING_POLL_S = 0.01
_PIPE_BYTES = 65536
_REPORT_BYTES = 16384  # the longest report of a shim


HOST_TROUBLE: Final = OUR_OWN_TROUBLE | {
    errno.EAGAIN,  # no more processes or threads
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ETXTBSY,  # the program is being written
}
"""Errors that this machine causes, not the program to start."""


class SpawnError(LlmuxError):
    """The program could not be started. The message has the reason, `kind` the class of the cause.

    The message never names the worker: clients read it, and may know the model by another name.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "spawn_failed"

    def __init__(self, message: str, kind: CrashClass = CrashClass.HOST) -> None:
        super().__init__(message)
        self.kind = kind


class UnkillableError(LlmuxError):
    """Processes of the tree survived SIGKILL beyond the wait. `pids` are the remaining ones, as far as known."""

    code = "unkillable"

    def __init__(self, message: str, pids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.pids = pids


class Shim(Protocol):
    """A shim with the daemon's ends of its pipes: a child process (`subprocess.Popen`), or an `AdoptedShim`."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self) -> int | None:
        """Collect its exit status once it has ended."""
        ...


class AdoptedShim:
    """A shim that another daemon started and handed over. That daemon, or the process that inherits the shim, reaps it."""

    def __init__(self, pid: int, stdin: int, stdout: int, pidfd: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.pidfd = pidfd

    def wait(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The exit of the leader; the whole tree has ended."""

    code: int | None  # negative: the signal's number; None: unknown, its shim was killed
    killed: bool = False  # by us
    oom_killed: bool = False  # by the kernel, for want of memory, as far as its counters tell


_tasks: set[asyncio.Task[object]] = set()
_workers: set[WorkerProcess] = set()
own_children: set[int] = set()
"""Pids of processes, besides shims, that we started in a session of their own: no hunt kills these."""
_is_subreaper = False


class WorkerProcess:
    """A running worker with all processes below it. Use it in the loop's thread, except `pids`.

    Made by `spawn.spawn`, or by `adopt` for a worker that another daemon handed over.
    """

    def __init__(self, name: str, mark: Mark, group: Path | None, shim: Shim) -> None:
        """Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.pid = 0
        self.unlogged = ""  # the reason why it has no log
        self.shim_pid = shim.pid
        self.started_at = time.monotonic()
        self.main_ended = asyncio.Event()  # the leader has ended; the rest of the tree is being killed
        self.running: asyncio.Future[None] = self._loop.create_future()
        self._exit: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._keep_confirmed = asyncio.Event()
        self.mark = mark
        self.group = group
        self._shim = shim
        self.shim_ended = False
        self._code: int | None = None
        self._tree_ended = False
        self._is_ending = False
        self._killed = False
        self._oom_kills = oom_kills()
        self._partial_report = b""
        assert shim.stdin is not None
        assert shim.stdout is not None
        self._stdin, self._stdout = shim.stdin, shim.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        try:
            self._pidfd = shim.pidfd if isinstance(shim, AdoptedShim) else os.pidfd_open(shim.pid)
        except OSError:
            self._stdin.close()  # the shim ends at once: it has no order yet
            self._stdout.close()
            shim.wait()
            raise
        _workers.add(self)
        self.listen()

    @classmethod
    def adopt(
        cls, name: str, mark: Mark, group: Path | None, shim: AdoptedShim, pid: int, started_at: float, heard: bytes
    ) -> WorkerProcess:
        """A worker that another daemon handed over; `heard` is the beginning of a report that it had not read completely."""
        process = cls(name, mark, group, shim)
        process.pid, process.started_at, process._partial_report = pid, started_at, heard
        process.running.set_result(None)
        return process

    # -------------------------------------------------------------------------------------------------------- controls

    async def wait(self) -> ProcessExit:
        """Wait until the last process of the tree is gone. Cancelling the wait changes nothing."""
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """Ask the tree to end, once: by its stop program if it has one, else by SIGTERM."""
        if not self._is_ending:
            self._is_ending = True
            self.send_line(b"term\n")

    def kill(self) -> None:
        """SIGKILL to the whole tree."""
        if not self._exit.done():
            self._is_ending = self._killed = True
            self.send_line(b"kill\n")

    async def stop(self, grace_s: float, kill_wait_s: float = 5.0) -> ProcessExit:
        """SIGTERM, `grace_s`, SIGKILL, `kill_wait_s`. A `kill()` meanwhile cuts the grace short.

        Raises UnkillableError if processes of the tree still live then; `wait()` goes on waiting for these. Cancelling
        undoes nothing: the tree was asked to end, or killed.
        """
        if grace_s > 0 and not self._killed:
            self.terminate()
            if await self.ends_within(grace_s):
                return self._exit.result()
        self.kill()
        if not await self.ends_within(kill_wait_s / 2):
            # A stopped or stuck shim reads no commands. After its death its processes are our children.
            if not self.shim_ended:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if not await self.ends_within(kill_wait_s / 2):
                pids = await asyncio.to_thread(self.pids)
                left = ", ".join(map(str, pids)) or "unknown"
                raise UnkillableError(f"still there {kill_wait_s:g} s after SIGKILL (pids: {left})", pids)
        return self._exit.result()

    async def ends_within(self, limit_s: float) -> bool:
        """Is the last process of the tree gone before `limit_s` have passed?"""
        await asyncio.wait({self._exit}, timeout=limit_s)
        return self._exit.done()

    def pids(self) -> tuple[int, ...]:
        """The living processes of the tree, the leader first. Blocks for milliseconds; safe in any thread."""
        below = ProcessTable.scan().tree((self.shim_pid,)) - {self.shim_pid}
        if self.shim_ended:  # another process may have its pid by now
            below = frozenset(proc.pid for proc in marked(self.mark))
        alive = (pid for pid in below if (proc := Proc.read(pid)) and proc.alive)
        return tuple(sorted(alive, key=lambda pid: (pid != self.pid, pid)))

    # ------------------------------------------------------------------------------------------------------ hand-over

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The shim's stdin and stdout and a pidfd of it, for a successor."""
        return self._stdin.fileno(), self._stdout.fileno(), self._pidfd

    @property
    def heard(self) -> bytes:
        """The beginning of a report that has not arrived completely."""
        return self._partial_report

    def listen(self) -> None:
        """Read the shim's reports, and watch for its end."""
        self._loop.add_reader(self._stdout.fileno(), self._read_reports)
        self._loop.add_reader(self._pidfd, self._on_shim_exit)

    async def keep(self, limit_s: float) -> None:
        """Let the tree outlive our death for `limit_s`. Returns once the shim has confirmed that, or has ended."""
        self._keep_confirmed.clear()
        self.send_line(b"keep %d\n" % limit_s)
        await self._keep_confirmed.wait()

    def pause(self) -> None:
        """Read no reports and watch for no end until `listen`: the successor does that."""
        self._loop.remove_reader(self._stdout.fileno())
        self._loop.remove_reader(self._pidfd)

    def let_go(self) -> None:
        """Leave the worker to the successor. A shim that is our child is still reaped when it ends."""
        self._stdin.close()
        self._stdout.close()
        self._loop.add_reader(self._pidfd, self._collect_child)

    def _collect_child(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._shim.wait()

    # ------------------------------------------------------------------------------------------------------- the shim

    def send_line(self, line: bytes) -> None:
        """Write to the shim; ignored after its end. Raises SpawnError for a line that exceeds the pipe's capacity."""
        if self._stdin.closed:
            return
        if len(line) > _PIPE_BYTES:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._stdin, fcntl.F_SETPIPE_SZ, len(line))
        try:
            written = os.write(self._stdin.fileno(), line)
        except BrokenPipeError:
            return
        except BlockingIOError:  # a stuck shim; stop() ends it
            return
        if written < len(line):
            message = "its command and environment are too long"
            raise SpawnError(message, CrashClass.BAD_ARGUMENTS)

    def abandon(self) -> None:
        """Close the shim's stdin, which makes it kill the whole tree."""
        self._is_ending = self._killed = True
        self._stdin.close()

    def _read_reports(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stdout.fileno())
        *lines, self._partial_report = (self._partial_report + data).split(b"\n")
        self._partial_report = self._partial_report[:_REPORT_BYTES]
        for line in lines:
            self._handle_report(line)

    def _handle_report(self, line: bytes) -> None:
        """Handle a report. Other lines are ignored: a worker can write into its shim's output, too."""
        try:
            fact: object = json.loads(line[:_REPORT_BYTES])
        except (ValueError, RecursionError):
            return
        match fact:
            case {"pid": int(pid), **rest}:
                self.pid, self.unlogged = pid, str(rest.get("unlogged", ""))
                if not self.running.done():
                    self.running.set_result(None)
            case {"failed": int(code), "step": str(step), "text": str(text)}:
                self._tree_ended = True
                self._fail_start(text, _crash_class(step, code))
            case {"exited": int(code)}:
                self._code = code
                self.main_ended.set()
            case {"kept": True}:
                self._keep_confirmed.set()
            case {"gone": True}:
                self._tree_ended = True
                self._keep_confirmed.set()

    def main_exited(self, code: int) -> None:
        """Note the leader's exit code: we reaped it, because its shim could not."""
        if self._code is None:
            self._code = code

    def _fail_start(self, message: str, kind: CrashClass = CrashClass.HOST) -> None:
        if not self.running.done():
            self.running.set_exception(SpawnError(message, kind))
            self.running.exception()  # marks it as retrieved, also when no task awaits it

    # --------------------------------------------------------------------------------------------------------- the end

    def _on_shim_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.shim_ended = True
        self._keep_confirmed.set()
        self.main_ended.set()
        self._read_reports()
        self._shim.wait()
        if self._tree_ended:
            self._finish_exit()
        else:
            task: asyncio.Task[object] = self._loop.create_task(self._kill_leftovers(), name=f"hunt {self.name}")
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)

    async def _kill_leftovers(self) -> None:
        """After the shim was killed: kill the other processes of the tree, however long that takes."""
        groups = () if self.group is None else (self.group,)
        with contextlib.closing(Hunt(self.mark, groups)) as hunt:
            while await asyncio.to_thread(hunt.round, 0.5, await self._list_adopted()):
                pass
        while _reap_adopted(await asyncio.to_thread(processes)):  # noqa: ASYNC110  there is no event for this
            await asyncio.sleep(_DYING_POLL_S)
        self._finish_exit()

    async def _list_adopted(self) -> list[Proc]:
        """The living processes of killed shims, even with a changed environment, except those of another worker.

        Every hunt kills processes that hide their worker.
        """
        table = await asyncio.to_thread(processes)
        # Here, in the loop's thread, every shim that the table can show is one of `_workers`.
        return [proc for proc in table if proc.alive and _is_adopted(proc) and worker_of(proc.pid) in (None, self.name)]

    def _finish_exit(self) -> None:
        _workers.discard(self)
        self._loop.remove_reader(self._stdout.fileno())
        self._stdin.close()
        self._stdout.close()
        os.close(self._pidfd)
        if self.group is not None:
            cgroup.remove(self.group)
        self._fail_start("its shim was killed")
        was_requested = self._killed or self._code != -signal.SIGKILL
        oom_killed = not was_requested and oom_kills() > self._oom_kills
        self._exit.set_result(ProcessExit(self._code, self._killed, oom_killed))


def _crash_class(step: str, code: int) -> CrashClass:
    """The class of a shim's failure at this step. A missing working directory may come back, a wrong program stays wrong."""
    if step not in ("cwd", "exec") or code in HOST_TROUBLE:
        return CrashClass.HOST
    return CrashClass.BAD_ARGUMENTS if step == "exec" else CrashClass.UNKNOWN


def become_subreaper() -> None:
    """Make this process the parent of processes that a killed shim leaves, to find and reap them. Raises OSError."""
    global _is_subreaper  # noqa: PLW0603  # the setting is global, too
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    _is_subreaper = True


def _is_adopted(proc: Proc) -> bool:
    """Did we adopt the process as subreaper? Children that we started have our session, except shims. For the loop's thread."""
    if not _is_subreaper or proc.parent != os.getpid() or proc.session == os.getsid(0) or proc.pid in own_children:
        return False
    return all(worker.shim_pid != proc.pid or worker.shim_ended for worker in _workers)


def _reap_adopted(table: Iterable[Proc]) -> bool:
    """Reap dead adopted processes. True: others are still dying, which a hunt no longer recognises."""
    dying = False
    for proc in filter(_is_adopted, table):
        if proc.alive:
            dying |= proc.dying
            continue
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(proc.pid, os.WNOHANG)
            for worker in _workers:
                if pid and worker.pid == pid:
                    worker.main_exited(os.waitstatus_to_exitcode(status))
    return dying
