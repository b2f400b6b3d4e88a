"""Worker processes as the daemon sees them: ask them to end, kill them, and know for certain that they are gone.

Each worker runs below a shim (see shim.py), which takes commands on stdin and reports on stdout. `WorkerProcess.wait()`
resolves only when the last process of the tree is dead: the shim says so once the kernel says that it has no children. If
the shim itself is killed, the worker's leader dies by its parent-death signal, the rest falls to the daemon
(`become_subreaper`), and a hunt by the worker's mark kills it.

Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from supervisor.errors import LlmuxError
from supervisor.io import cgroup
from supervisor.io.procfs import Proc, ProcessTable, oom_kills, processes
from supervisor.io.reap import Hunt, Mark, marked

_PR_SET_CHILD_SUBREAPER = 36
_DYING_POLL_S = 0.01
_PIPE_BYTES = 65536
_REPORT_BYTES = 16384  # no report of a shim is longer


class SpawnError(LlmuxError):
    """The program could not be started at all; the message says why."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "spawn_failed"


class UnkillableError(LlmuxError):
    """The tree is still there although SIGKILL was sent and the wait is over. `pids` are those left, as far as known."""

    code = "unkillable"

    def __init__(self, message: str, pids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.pids = pids


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How the leader ended; the whole tree is gone."""

    code: int | None  # negative: the signal's number; None: unknown, its shim was killed
    killed: bool = False  # by us
    oom_killed: bool = False  # by the kernel, for want of memory, as far as its counters tell


_tasks: set[asyncio.Task[object]] = set()


class WorkerProcess:
    """A running worker and everything below it. Made by `spawn.spawn`; use it in the loop's thread, but for `pids`."""

    def __init__(self, name: str, mark: Mark, group: Path | None, shim: subprocess.Popen[bytes]) -> None:
        """Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.pid = 0
        self.shim_pid = shim.pid
        self.started_at = time.monotonic()
        self.leader_ended = asyncio.Event()  # it answers no more; the rest of the tree is being killed
        self.running: asyncio.Future[None] = self._loop.create_future()
        self._exit: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._mark = mark
        self._group = group
        self._shim = shim
        self._shim_gone = False
        self._code: int | None = None
        self._gone = False
        self._told_to_end = False
        self._killed = False
        self._oom_kills = oom_kills()
        self._heard = b""
        assert shim.stdin is not None
        assert shim.stdout is not None
        self._stdin, self._stdout = shim.stdin, shim.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        try:
            self._pidfd = os.pidfd_open(shim.pid)
        except OSError:
            self._stdin.close()  # it ends at once: it has no order yet
            self._stdout.close()
            shim.wait()
            raise
        self._loop.add_reader(self._stdout.fileno(), self._listen)
        self._loop.add_reader(self._pidfd, self._shim_ended)

    # -------------------------------------------------------------------------------------------------------- controls

    async def wait(self) -> ProcessExit:
        """Until the last process of the tree is gone. Cancelling it changes nothing."""
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """Ask the tree to end, once: its stop program if it has one, else SIGTERM."""
        if not self._told_to_end:
            self._told_to_end = True
            self.tell(b"term\n")

    def kill(self) -> None:
        """SIGKILL to the whole tree."""
        if not self._exit.done():
            self._told_to_end = self._killed = True
            self.tell(b"kill\n")

    async def stop(self, grace_s: float, kill_wait_s: float = 5.0) -> ProcessExit:
        """SIGTERM, `grace_s`, SIGKILL, `kill_wait_s`. A `kill()` meanwhile cuts the grace short.

        Raises UnkillableError when something of the tree is still there then; `wait()` goes on waiting for it. Cancelling
        leaves it where it is: asked to end, or killed.
        """
        if grace_s > 0 and not self._killed:
            self.terminate()
            if await self.ends_within(grace_s):
                return self._exit.result()
        self.kill()
        if not await self.ends_within(kill_wait_s / 2):
            # A shim that is stopped or stuck hears nothing. Its death hands what is left to us.
            if not self._shim_gone:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if not await self.ends_within(kill_wait_s / 2):
                pids = await asyncio.to_thread(self.pids)
                left = ", ".join(map(str, pids)) or "unknown"
                raise UnkillableError(
                    f"{self.name} is still there {kill_wait_s:g} s after SIGKILL (pids: {left})", pids
                )
        return self._exit.result()

    async def ends_within(self, limit_s: float) -> bool:
        """Is the last process of the tree gone before `limit_s` have passed?"""
        await asyncio.wait({self._exit}, timeout=limit_s)
        return self._exit.done()

    def pids(self) -> tuple[int, ...]:
        """The living processes of the tree, the leader first. Blocks for milliseconds; safe in any thread."""
        below = ProcessTable.scan().tree((self.shim_pid,)) - {self.shim_pid}
        if self._shim_gone:  # its pid may be anybody's by now
            below = frozenset(proc.pid for proc in marked(self._mark))
        alive = (pid for pid in below if (proc := Proc.read(pid)) and proc.alive)
        return tuple(sorted(alive, key=lambda pid: (pid != self.pid, pid)))

    # ------------------------------------------------------------------------------------------------------- the shim

    def tell(self, line: bytes) -> None:
        """Write to the shim. Silent when it is gone. Raises SpawnError for more than a pipe holds."""
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
            raise SpawnError(f"{self.name} can't be started: its command and environment are too long")

    def abandon(self) -> None:
        """End of file makes the shim kill everything."""
        self._told_to_end = self._killed = True
        self._stdin.close()

    def _listen(self) -> None:
        try:
            said = os.read(self._stdout.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return
        if not said:
            self._loop.remove_reader(self._stdout.fileno())
        *lines, self._heard = (self._heard + said).split(b"\n")
        self._heard = self._heard[:_REPORT_BYTES]
        for line in lines:
            self._note(line)

    def _note(self, line: bytes) -> None:
        """A report. What is none is passed over: a worker can write into its shim's output, too."""
        try:
            fact: object = json.loads(line[:_REPORT_BYTES])
        except (ValueError, RecursionError):
            return
        match fact:
            case {"pid": int(pid)}:
                self.pid = pid
                if not self.running.done():
                    self.running.set_result(None)
            case {"failed": _, "text": str(text)}:
                self._gone = True
                self._fail(f"{self.name} can't be started: {text}")
            case {"exited": int(code)}:
                self._code = code
                self.leader_ended.set()
            case {"gone": True}:
                self._gone = True

    def _fail(self, message: str) -> None:
        if not self.running.done():
            self.running.set_exception(SpawnError(message))
            self.running.exception()  # retrieved, also when nobody waits for it

    # --------------------------------------------------------------------------------------------------------- the end

    def _shim_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._shim_gone = True
        self.leader_ended.set()
        self._listen()
        self._shim.wait()
        if self._gone:
            self._finish()
        else:
            task: asyncio.Task[object] = self._loop.create_task(self._hunt(), name=f"hunt {self.name}")
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)

    async def _hunt(self) -> None:
        """The shim was killed: find the rest by its mark, however long it takes."""
        groups = () if self._group is None else (self._group,)
        with contextlib.closing(Hunt(self._mark, groups)) as hunt:
            while await asyncio.to_thread(hunt.round, 0.5):
                pass
        while await asyncio.to_thread(self._collect, {self.pid, *hunt.commands}):  # noqa: ASYNC110  nobody tells us
            await asyncio.sleep(_DYING_POLL_S)
        self._finish()

    def _collect(self, struck: set[int]) -> bool:
        """Reap the dead that fell to us as subreaper. True: others are still dying, which a hunt no longer recognises.

        Only those that were struck, or that can't be anybody else's: asyncio and subprocess wait for their own children,
        which have our session or one of their own.
        """
        dying = False
        us, our_session = os.getpid(), os.getsid(0)
        for proc in processes():
            if proc.parent != us or not (proc.pid in struck or proc.session not in (our_session, proc.pid)):
                continue
            if proc.alive:
                dying |= proc.dying
                continue
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(proc.pid, os.WNOHANG)
                if pid == self.pid and self._code is None:
                    self._code = os.waitstatus_to_exitcode(status)
        return dying

    def _finish(self) -> None:
        self._loop.remove_reader(self._stdout.fileno())
        self._stdin.close()
        self._stdout.close()
        os.close(self._pidfd)
        if self._group is not None:
            cgroup.remove(self._group)
        self._fail(f"{self.name} can't be started: its shim was killed")
        asked_for = self._killed or self._code != -signal.SIGKILL
        oom_killed = not asked_for and oom_kills() > self._oom_kills
        self._exit.set_result(ProcessExit(self._code, self._killed, oom_killed))


def become_subreaper() -> None:
    """Let what escapes a killed shim fall to this process, so that it can be found and reaped. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
