"""The old daemon's side of an upgrade: hands its workers and its socket to a successor, and reports its running requests.

1. A successor connects to `takeover.sock` and introduces itself. A handover that can't work is refused here.
2. Calm: no load begins and no memory is leased; running starts and stops end first. Loaded models keep answering.
3. The stores are closed, and the successor gets copies of every descriptor: the listening sockets, the lock, the shims'
   pipes. The successor opens the stores and answers that it is ready, or why not.
4. Each shim gets the order `keep`. Then scheduling stops, and the successor gets the present state of the workers.
5. The successor serves. Only now the old daemon releases everything; the successor orders the shims to follow its own life.

A failure before 5 ends the successor and leaves the old daemon as it was. So does a successor that doesn't answer within
`ANSWER_S`. After 5 the old daemon completes its running requests, and sends all new ones to the successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import structlog

from supervisor.core.events import HandoverEnded, HandoverRequested
from supervisor.core.types import TicketId
from supervisor.daemon.daemon import Daemon
from supervisor.engine.handover_messages import VERSION, TakeoverError, general_message, last_message, worker_message
from supervisor.errors import LlmuxError
from supervisor.fleet.local import LocalLauncher
from supervisor.host.process import notify
from supervisor.host.process.fd_channel import ChannelClosedError, FdChannel, FdListener, Json
from supervisor.host.process.process import WorkerProcess
from supervisor.host.process.reap import InstanceLock
from supervisor.host.store.store import Store
from supervisor.host.upstream.upstream import UpstreamPool
from supervisor.schema.daemon import Upgrade

log = structlog.get_logger("llmux.upgrade")

SOCKET: Final = "takeover.sock"
OPTION: Final = "--takeover"
STDERR: Final = "TAKEOVER_STDERR"
"""The variable that names the descriptor of the old daemon's stderr: the successor's own is a pipe until it serves."""

START_S: Final = 60.0  # for a successor that we started to connect; until then nothing waits for it
MEET_S: Final = 10.0
CALM_S: Final = 300.0  # for running loads
ANSWER_S: Final = 8.0
"""For the successor to open the stores, and later to serve. Including its end, a hung successor blocks us for at most 10 s."""
KEEP_S: Final = 10.0  # for the shims to confirm `keep`
END_S: Final = 1.0  # for a failed successor to exit by itself, and again for a killed one to be gone
ERROR_LINES: Final = 20  # of a successor that can't start
REASON_CHARACTERS: Final = 300  # of the reason in a refusal


@dataclass(slots=True)
class Holdings:
    """The machine's resources that a daemon holds, besides its workers."""

    address: tuple[str, int]  # as configured
    listeners: tuple[int, ...]  # their descriptors, that of the address first
    lock: InstanceLock
    launcher: LocalLauncher
    stores: tuple[Store, ...]
    answers_at: tuple[str, int]  # where this machine reaches the listener


@dataclass(slots=True)
class _Child:
    """The successor's process, which this daemon started itself."""

    pid: int
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)  # it serves, or has failed
    why: str = ""  # the reason of the failure


class Handover:
    """Waits for a successor. Create it in the event loop's thread; `done` is set after a handover."""

    def __init__(self, daemon: Daemon, holdings: Holdings, path: Path) -> None:
        self.done = asyncio.Event()
        self.successor = 0  # its pid
        self.running = 0  # requests here at the hand-over
        self._daemon = daemon
        self._holdings = holdings
        self._attempt: asyncio.Task[None] | None = None
        self._child: _Child | None = None
        self._finished: deque[TicketId] = deque()
        self._has_finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._path = path
        self._listener: FdListener | None = None

    def listen(self) -> None:
        """Accept successors from now on."""
        self._listener = FdListener(self._path, self._accept)

    async def close(self) -> None:
        """Accept no more successors, and cancel a running handover. A successor learns that our requests are over."""
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------- starting a successor

    async def upgrade(self) -> Upgrade:
        """Start the installed program, with our own arguments, as our successor. Returns once it serves.

        Continues if the caller is cancelled. Raises TakeoverError with the reason of a failure; then nothing has changed.
        """
        return await asyncio.shield(asyncio.create_task(self._upgrade(), name="upgrade"))

    async def _upgrade(self) -> Upgrade:
        if self._attempt is not None or self._child is not None or self.done.is_set():
            raise TakeoverError("Another upgrade is under way already.")
        try:
            process = _start_successor()
        except OSError as error:
            raise TakeoverError(f"The new llmux can't be started: {error}") from error
        stderr_lines: deque[str] = deque(maxlen=ERROR_LINES)
        copying = asyncio.create_task(_copy_stderr(process.stderr, stderr_lines))
        pidfd = os.pidfd_open(process.pid)
        try:
            why = await self._wait_for_outcome(_Child(process.pid), pidfd)
            if not self.done.is_set():
                await _end_process(pidfd)
        finally:
            if not self.done.is_set():
                _kill(pidfd)
            os.close(pidfd)
        if self.done.is_set():
            return Upgrade(self.successor, self.running)
        with contextlib.suppress(TimeoutError):  # a child of the process may hold its stderr
            async with asyncio.timeout(END_S):
                await copying
        why = why or (stderr_lines[-1] if stderr_lines else f"exit code {process.poll()}")
        raise TakeoverError(f"The new llmux did not take over, this one goes on: {why}", detail=tuple(stderr_lines))

    async def _wait_for_outcome(self, child: _Child, pidfd: int) -> str:
        """Wait until the process that we started serves, has exited, or was refused. Returns the reason of a failure, if known."""
        self._child = child
        begins = {asyncio.create_task(each) for each in (_wait_for_exit(pidfd), child.connected.wait())}
        try:
            ended, _ = await asyncio.wait(begins, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if child.connected.is_set():
                await child.over.wait()  # `_serve_successor` has time limits
            elif not ended:
                return f"it did not come within {START_S:.0f} s"
            return child.why
        finally:
            self._child = None
            for each in begins:
                each.cancel()

    # ---------------------------------------------------------------------------------------------------- the hand-over

    def _accept(self, channel: FdChannel) -> None:
        task = asyncio.create_task(self._serve_successor(channel), name="hand-over")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_successor(self, channel: FdChannel) -> None:
        """Serve a connection of a possible successor, until it ends."""
        is_ours = self._child is not None and channel.pid == self._child.pid
        child = self._child if self._child is not None and is_ours else _Child(channel.pid)
        child.connected.set()
        try:
            await self._try_hand_over(channel)
        except (LlmuxError, ChannelClosedError, OSError) as error:
            child.why = (str(error) or repr(error))[:REASON_CHARACTERS]
            log.error("upgrade.failed", successor=channel.pid, reason=child.why)  # noqa: TRY400  # an error of the successor
            await _refuse(channel, child.why)
            return
        finally:
            child.over.set()
        await self._report_ends(channel)

    async def _try_hand_over(self, channel: FdChannel) -> None:
        """Try to hand over to the other daemon. Raises LlmuxError, ChannelClosedError or OSError; then nothing has changed."""
        async with _time_limit(MEET_S, f"it did not say who it is within {MEET_S:.0f} s"):
            self._check((await channel.receive()).content)
        attempt = self._attempt = asyncio.current_task()
        self._daemon.settled.clear()
        log.info("upgrade.began", successor=channel.pid)
        try:
            await self._hand_over(channel)
        finally:
            assert attempt is self._attempt
            self._attempt = None
            self._daemon.settled.set()

    def _check(self, hello: Json) -> None:
        """Check the successor's request. Raises TakeoverError if a handover can't work."""
        if self._attempt is not None or self.done.is_set():
            raise TakeoverError("Another upgrade is under way already.")
        if self._daemon.engine.queue().is_stopping:
            raise TakeoverError("The daemon is shutting down.")
        if hello.get("version") != VERSION:
            raise TakeoverError(
                f"The running llmux hands over in version {VERSION}, not {hello.get('version')}: restart it instead."
            )
        (host, port), theirs = self._holdings.address, hello.get("address")
        if theirs != [host, port]:
            wanted = ":".join(map(str, theirs)) if isinstance(theirs, list) else theirs
            raise TakeoverError(
                f"The running llmux listens on {host}:{port}, which only a restart can change to {wanted}."
            )

    async def _hand_over(self, channel: FdChannel) -> None:
        engine, stores = self._daemon.engine, self._holdings.stores
        pidfd = os.pidfd_open(channel.pid)
        engine.post(HandoverRequested())
        try:
            await self._wait_until_calm(pidfd)
            await self._daemon.batches.close()
            await self._daemon.inference.close()  # the successor runs the jobs
            self._daemon.jobs.stop()
            if self._daemon.request_log is not None:
                await self._daemon.request_log.flush()
            for store in stores:
                await store.lend()
            async with _time_limit(ANSWER_S, f"it did not get ready within {ANSWER_S:.0f} s"):
                await self._send_state(channel)
            await self._wait_until_calm(pidfd)
            processes = await self._commit(channel, pidfd)
        except BaseException as error:
            await _refuse(channel, str(error) or repr(error))
            await asyncio.shield(_end_process(pidfd))
            for store in stores:
                await store.take_back()
            self._daemon.batches.go_on()
            self._daemon.inference.go_on()
            self._daemon.jobs.start()
            engine.post(HandoverEnded())
            raise
        finally:
            os.close(pidfd)
        try:  # outside the block above: a bug here must not end the successor, which has everything
            self._release_all(channel, processes)
        except Exception:
            log.exception("upgrade.unfinished", successor=channel.pid)
        with contextlib.suppress(ChannelClosedError):  # it died just now, and so the shims will end
            await channel.send({"yours": True})

    async def _send_state(self, channel: FdChannel) -> None:
        """Send copies of everything. The successor answers whether it can use them."""
        engine, running = self._daemon.engine, self._holdings.launcher.running()
        adoptions = engine.adoptions()
        main, *extra = self._holdings.listeners
        descriptors = main, self._holdings.lock.file.fileno(), *extra
        general = general_message(
            engine.pins(), engine.unloaded_by_operator(), self._daemon.fleet.overrides(), len(adoptions)
        )
        await channel.send(general, descriptors)
        for adopted in adoptions:
            process, spec = running[adopted.model, adopted.generation]
            await channel.send(worker_message(adopted, process, spec), process.descriptors)
        await _await_answer(channel, "prepared")

    async def _wait_until_calm(self, pidfd: int) -> None:
        """Wait until no worker is starting or stopping, while the successor lives. Raises LlmuxError."""
        calm, exited = asyncio.create_task(self._daemon.engine.calm()), asyncio.create_task(_wait_for_exit(pidfd))
        try:
            await asyncio.wait({calm, exited}, timeout=CALM_S, return_when=asyncio.FIRST_COMPLETED)
            if not calm.done():
                late = f"what was starting or stopping did not end within {CALM_S:.0f} s"
                raise TakeoverError("it ended meanwhile" if exited.done() else late)
            await calm
        finally:
            calm.cancel()
            exited.cancel()

    async def _commit(self, channel: FdChannel, pidfd: int) -> list[WorkerProcess]:
        """Give everything to the successor, and wait until it serves; nothing is scheduled meanwhile. Returns the workers' processes."""
        engine = self._daemon.engine
        kept = [process for process, _ in self._holdings.launcher.running().values()]
        processes: list[WorkerProcess] = []
        try:
            async with _time_limit(KEEP_S, f"the workers were not ready to be kept within {KEEP_S:.0f} s"):
                await asyncio.gather(*(process.keep(3 * KEEP_S) for process in kept))
                await engine.calm()
            engine.freeze()
            adoptions = engine.adoptions()
            running = self._holdings.launcher.running()
            processes += (running[adopted.model, adopted.generation][0] for adopted in adoptions)
            for process in processes:
                process.pause()
            async with _time_limit(ANSWER_S, f"it did not begin to serve within {ANSWER_S:.0f} s"):
                for adopted, process in zip(adoptions, processes, strict=True):
                    await channel.send(last_message(adopted, process.heard))
                await channel.send({"commit": True})
                await _await_answer(channel, "serving")
        except BaseException:
            _kill(pidfd)  # it must not use resources that stay here
            for process in kept:
                process.send_line(b"adopt %d\n" % os.getpid())
            for process in processes:
                process.listen()
            engine.thaw()
            raise
        return processes

    def _release_all(self, channel: FdChannel, processes: list[WorkerProcess]) -> None:
        self.done.set()
        self.successor = channel.pid
        notify.notify(f"MAINPID={channel.pid}")
        host, port = self._holdings.answers_at
        day_s = 86400.0  # the successor has the time limits; it listens even if we stall
        self._daemon.successor = UpstreamPool(
            host, port, connect_s=day_s, first_byte_s=day_s, stream_idle_s=day_s, names_host=False
        )
        self._daemon.engine.hand_over(self._note_end)
        self._holdings.lock.close()  # the successor's copy keeps it locked; if the successor dies, another daemon may start at once
        self._daemon.fleet.let_go()
        for process in processes:
            process.let_go()
        if self._listener is not None:
            self._listener.stop_listening()
        self.running = self._daemon.engine.queue().in_flight
        log.info("upgrade.handed_over", successor=channel.pid, running=self.running)

    # ------------------------------------------------------------------------------------------------------- afterwards

    def _note_end(self, ticket: TicketId) -> None:
        self._finished.append(ticket)
        self._has_finished.set()

    async def _report_ends(self, channel: FdChannel) -> None:
        """Report the end of each running request. The end of the messages means that all have ended."""
        try:
            while True:
                await self._has_finished.wait()
                self._has_finished.clear()
                ended, self._finished = self._finished, deque()
                for ticket in ended:
                    await channel.send({"finished": ticket})
        except ChannelClosedError:
            log.warning("upgrade.successor_gone", successor=channel.pid)
        finally:
            channel.close()


@contextlib.asynccontextmanager
async def _time_limit(limit_s: float, late: str) -> AsyncIterator[None]:
    """A time limit for the block. Raises TakeoverError with the message `late` after it."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise TakeoverError(late) from error


async def _await_answer(channel: FdChannel, word: str) -> None:
    """Wait for this answer of the successor. Raises TakeoverError with the reason of a refusal."""
    answer = (await channel.receive()).content
    if word not in answer:
        raise TakeoverError(str(answer.get("failed", f"it did not say that it is {word}")))


async def _refuse(channel: FdChannel, why: str) -> None:
    with contextlib.suppress(ChannelClosedError, TimeoutError):
        async with asyncio.timeout(END_S):  # it may not read
            await channel.send({"refused": why})
    channel.close()


async def _wait_for_exit(pidfd: int, within_s: float | None = None) -> bool:
    """Wait for the end of a process. Returns whether it has ended. Uses a copy of the descriptor: a loop can wait for each only once."""
    ended, own = asyncio.Event(), os.dup(pidfd)
    asyncio.get_running_loop().add_reader(own, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(own)
        os.close(own)
    return ended.is_set()


async def _end_process(pidfd: int) -> None:
    """End the process. First it has a moment to print the reason of its failure and exit by itself."""
    if not await _wait_for_exit(pidfd, END_S):
        _kill(pidfd)
        await _wait_for_exit(pidfd, END_S)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _start_successor() -> subprocess.Popen[bytes]:
    """Start the installed program with our own arguments. Raises OSError.

    Not by asyncio, which would leak copies of its standard streams to the process, and to its own successors.
    """
    options = [] if OPTION in sys.orig_argv else [OPTION]
    stderr = os.dup(2)
    env = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"} | {STDERR: str(stderr)}
    try:
        return subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:], *options],
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(stderr,),
        )
    finally:
        os.close(stderr)


async def _copy_stderr(pipe: IO[bytes] | None, lines: deque[str]) -> None:
    """Copy the successor's stderr to our own, and to `lines`."""
    stderr = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), pipe)
    while line := await stderr.readline():
        with contextlib.suppress(OSError):
            os.write(2, line)
        if text := line.decode("utf-8", "replace").strip():
            lines.append(text)
