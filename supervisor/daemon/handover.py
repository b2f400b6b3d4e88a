"""The old daemon's side of an upgrade: hands its workers and its socket to a successor, and tells it what still runs.

1. A successor connects to `takeover.sock` and says who it is. What can't work is refused here.
2. Calm: no load begins and no memory is claimed; what starts or stops ends first. Loaded models answer as ever.
3. The stores are closed, and the successor gets copies of every descriptor: the listening sockets, the lock, the shims'
   pipes. It opens the stores and says that it is ready, or why not.
4. Each shim is told to `keep`. Then nothing is scheduled any more, and the successor gets what runs now.
5. The successor serves. Only now the old daemon lets go; the successor tells the shims whose death counts from now on.

Whatever fails before 5 ends the successor and leaves the old daemon as it was. After 5 it answers what runs here, and
sends everything else to the successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from pydantic import JsonValue

from supervisor.core.events import HandoverAsked, HandoverEnded
from supervisor.core.types import TicketId
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.estate import VERSION, TakeoverError, general_message, last_message, worker_message
from supervisor.errors import LlmuxError
from supervisor.fleet.local import LocalLauncher
from supervisor.io import notify
from supervisor.io.fd_channel import ChannelClosedError, FdChannel, FdListener, Json
from supervisor.io.process import WorkerProcess
from supervisor.io.reap import InstanceLock
from supervisor.io.store import Store
from supervisor.io.upstream import UpstreamPool

log = structlog.get_logger("llmux.upgrade")

SOCKET: Final = "takeover.sock"
OPTION: Final = "--takeover"
STDERR: Final = "TAKEOVER_STDERR"
"""The variable that names the descriptor of the old daemon's stderr: the successor's own is a pipe until it serves."""

MEET_S: Final = 10.0
CALM_S: Final = 300.0  # for loads that are under way
PREPARE_S: Final = 120.0  # for the successor to open the stores
KEEP_S: Final = 10.0  # from the last word to the shims until the successor serves and has told them
END_S: Final = 2.0  # for a successor that failed to end by itself
UPGRADE_S: Final = MEET_S + CALM_S + PREPARE_S + 2 * KEEP_S + 60.0
TOLD_LINES: Final = 20  # of a successor that can't start


@dataclass(slots=True)
class Holdings:
    """What a daemon holds of the machine, besides what its workers are."""

    address: tuple[str, int]  # as configured
    listeners: tuple[int, ...]  # their descriptors, that of the address first
    lock: InstanceLock
    launcher: LocalLauncher
    stores: tuple[Store, ...]
    answers_at: tuple[str, int]  # where this machine reaches the listener


class Handover:
    """Waits for a successor. Make it in the event loop's thread; `done` is set once there is one."""

    def __init__(self, daemon: Daemon, holdings: Holdings, path: Path) -> None:
        self.done = asyncio.Event()
        self.successor = 0  # its pid
        self.running = 0  # requests here at the hand-over
        self._daemon = daemon
        self._holdings = holdings
        self._attempt: asyncio.Task[None] | None = None
        self._finished: deque[TicketId] = deque()
        self._has_finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._path = path
        self._listener: FdListener | None = None

    def listen(self) -> None:
        """From now on a successor may come."""
        self._listener = FdListener(self._path, self._connected)

    async def close(self) -> None:
        """Take no successor any more: one that is on its way ends. Where there is one, it learns that all is over here."""
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- a new one

    async def upgrade(self) -> dict[str, JsonValue]:
        """Start the program that is installed now, with our own arguments, as our successor; returns once it serves.

        Goes on if the caller is cancelled. Raises TakeoverError with its words when it can't; then nothing has changed.
        """
        return await asyncio.shield(asyncio.create_task(self._upgrade(), name="upgrade"))

    async def _upgrade(self) -> dict[str, JsonValue]:
        if self._attempt is not None or self.done.is_set():
            raise TakeoverError("Another upgrade is under way already.")
        options = [] if OPTION in sys.orig_argv else [OPTION]
        stderr = os.dup(2)
        env = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"} | {STDERR: str(stderr)}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *sys.orig_argv[1:],
                *options,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(stderr,),
            )
        except OSError as error:
            raise TakeoverError(f"The new llmux can't be started: {error}") from error
        finally:
            os.close(stderr)
        assert process.stderr is not None
        said: deque[str] = deque(maxlen=TOLD_LINES)
        copying = asyncio.create_task(_copy(process.stderr, said))
        ended, done = asyncio.create_task(process.wait()), asyncio.create_task(self.done.wait())
        await asyncio.wait({ended, done}, timeout=UPGRADE_S, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        if self.done.is_set():
            return {"pid": self.successor, "running": self.running}
        if not ended.done():
            process.kill()
        code = await ended
        await copying
        why = said[-1] if said else f"exit code {code}"
        raise TakeoverError(f"The new llmux did not take over, this one goes on: {why}", detail=tuple(said))

    # -------------------------------------------------------------------------------------------------- the hand-over

    def _connected(self, channel: FdChannel) -> None:
        task = asyncio.create_task(self._meet(channel), name="hand-over")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _meet(self, channel: FdChannel) -> None:
        """One who wants to be the successor, to the end of the connection."""
        try:
            async with asyncio.timeout(MEET_S):
                hello = (await channel.receive()).content
            self._check(hello)
        except (LlmuxError, ChannelClosedError, TimeoutError) as error:
            await _refuse(channel, str(error))
            return
        attempt = self._attempt = asyncio.current_task()
        self._daemon.settled.clear()
        log.info("upgrade.began", successor=channel.pid)
        try:
            await self._hand_over(channel)
        except (LlmuxError, ChannelClosedError, TimeoutError, OSError) as error:
            log.error("upgrade.failed", successor=channel.pid, reason=str(error) or repr(error))  # noqa: TRY400  # theirs
        finally:
            assert attempt is self._attempt
            self._attempt = None
            self._daemon.settled.set()
        if self.done.is_set():
            await self._tell_ends(channel)

    def _check(self, hello: Json) -> None:
        """Raises TakeoverError for what can never work."""
        if self._attempt is not None or self.done.is_set():
            raise TakeoverError("Another upgrade is under way already.")
        if self._daemon.engine.queue().is_stopping:
            raise TakeoverError("The daemon is shutting down.")
        if hello.get("version") != VERSION:
            raise TakeoverError(
                f"The running llmux hands over in version {VERSION}, not {hello.get('version')}: restart it instead."
            )
        ours, theirs = self._holdings.address, tuple(hello.get("address", ()))
        if ours != theirs:
            raise TakeoverError(
                f"The running llmux listens on {ours[0]}:{ours[1]}, which only a restart can change to "
                f"{':'.join(map(str, theirs))}."
            )

    async def _hand_over(self, channel: FdChannel) -> None:
        engine, stores = self._daemon.engine, self._holdings.stores
        pidfd = os.pidfd_open(channel.pid)
        engine.post(HandoverAsked())
        try:
            async with asyncio.timeout(CALM_S):
                await engine.calm()
            await self._daemon.jobs.close()  # its successor runs them
            for store in stores:
                await store.lend()
            await self._give(channel)
            async with asyncio.timeout(CALM_S):
                await engine.calm()
            processes = await self._commit(channel, pidfd)
        except BaseException as error:
            await _refuse(channel, _reason(error))
            await asyncio.shield(_end(pidfd))
            for store in stores:
                await store.take_back()
            self._daemon.jobs.go_on()
            engine.post(HandoverEnded())
            raise
        finally:
            os.close(pidfd)
        try:  # out here: a mistake in it must not end the successor, which has everything
            self._let_go(channel, processes)
        except Exception:
            log.exception("upgrade.unfinished", successor=channel.pid)
        with contextlib.suppress(ChannelClosedError):  # it died just now, and with it the shims' last hold
            await channel.send({"yours": True})

    async def _give(self, channel: FdChannel) -> None:
        """Copies of everything. The successor says whether it can go on with them."""
        engine, running = self._daemon.engine, self._holdings.launcher.running()
        adoptions = engine.adoptions()
        main, *extra = self._holdings.listeners
        descriptors = main, self._holdings.lock.file.fileno(), *extra
        general = general_message(engine.pins(), engine.dismissed(), self._daemon.fleet.overrides(), len(adoptions))
        await channel.send(general, descriptors)
        for adopted in adoptions:
            process, spec = running[adopted.model, adopted.generation]
            await channel.send(worker_message(adopted, process, spec), process.descriptors)
        async with asyncio.timeout(PREPARE_S):
            answer = (await channel.receive()).content
        if "prepared" not in answer:
            raise TakeoverError(str(answer.get("failed", "it did not say why")))

    async def _commit(self, channel: FdChannel, pidfd: int) -> list[WorkerProcess]:
        """Everything is the successor's; returns the workers' processes. Nothing is scheduled here for as long as it needs to begin to listen."""
        engine = self._daemon.engine
        kept = [process for process, _ in self._holdings.launcher.running().values()]
        processes: list[WorkerProcess] = []
        try:
            async with asyncio.timeout(KEEP_S):
                await asyncio.gather(*(process.keep(3 * KEEP_S) for process in kept))
            async with asyncio.timeout(KEEP_S):
                await engine.calm()
            engine.freeze()
            adoptions = engine.adoptions()
            running = self._holdings.launcher.running()
            processes += (running[adopted.model, adopted.generation][0] for adopted in adoptions)
            for process in processes:
                process.pause()
            async with asyncio.timeout(KEEP_S):
                for adopted, process in zip(adoptions, processes, strict=True):
                    await channel.send(last_message(adopted, process.heard))
                await channel.send({"commit": True})
                await channel.receive()  # it serves
        except BaseException:
            _kill(pidfd)  # it must not go on with what stays here
            for process in kept:
                process.tell(b"adopt %d\n" % os.getpid())
            for process in processes:
                process.listen()
            engine.thaw()
            raise
        return processes

    def _let_go(self, channel: FdChannel, processes: list[WorkerProcess]) -> None:
        self.done.set()
        self.successor = channel.pid
        notify.notify(f"MAINPID={channel.pid}")
        host, port = self._holdings.answers_at
        day_s = 86400.0  # it is the successor that bounds how long an answer may take
        self._daemon.successor = UpstreamPool(host, port, first_byte_s=day_s, stream_idle_s=day_s, names_host=False)
        self._daemon.engine.leave(self._note_end)
        self._holdings.lock.close()  # the successor's copy holds it on: where that one dies, another may start at once
        self._daemon.fleet.let_go()
        for process in processes:
            process.let_go()
        if self._listener is not None:
            self._listener.leave()
        self.running = self._daemon.engine.queue().in_flight
        log.info("upgrade.handed_over", successor=channel.pid, running=self.running)

    # ------------------------------------------------------------------------------------------------------ afterwards

    def _note_end(self, ticket: TicketId) -> None:
        self._finished.append(ticket)
        self._has_finished.set()

    async def _tell_ends(self, channel: FdChannel) -> None:
        """Which requests ended, while any runs. The end of the messages says that all did."""
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


def _reason(error: BaseException) -> str:
    return "it took too long" if isinstance(error, TimeoutError) else str(error) or repr(error)


async def _refuse(channel: FdChannel, why: str) -> None:
    with contextlib.suppress(ChannelClosedError):
        await channel.send({"refused": why})
    channel.close()


async def _end(pidfd: int) -> None:
    """Until the process is gone; it has a moment to say why it failed."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await ended.wait()
        _kill(pidfd)
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


async def _copy(stderr: asyncio.StreamReader, said: deque[str]) -> None:
    """To our own, and the last lines for who asked."""
    while line := await stderr.readline():
        with contextlib.suppress(OSError):
            os.write(2, line)
        if text := line.decode("utf-8", "replace").strip():
            said.append(text)
