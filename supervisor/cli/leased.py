"""Run a command under a lease: send heartbeats while it lives, and end its whole process tree with this process.

The command runs below a shim, as workers do, with our own stdin, stdout and stderr. So none of its processes survives this
process; the lease then ends by its time to live. While the daemon can't be reached the command goes on: nothing is loaded
meanwhile, and a restarted daemon knows the lease. When the daemon reports the end of the lease, the command ends, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from supervisor.cli import operations
from supervisor.cli.client import Client
from supervisor.cli.serving.own_process import on_signals, signals_end
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.host.process.process import WorkerProcess, become_subreaper
from supervisor.host.process.spawn import SpawnOrder, spawn
from supervisor.schema.memory import Lease, LeaseRenewal

GRACE_S: Final = 10.0
KILL_WAIT_S: Final = 5.0
SIGNALLED: Final = 128
"""Added to a signal's number, a shell's exit code of a command that the signal ended."""


def run(daemon: Client, lease: Lease, command: Sequence[str]) -> int:
    """Run the command, end the lease, and return the command's exit code. Raises SpawnError when the command can't be started."""
    code = SIGNALLED + signal.SIGINT
    with signals_end():
        try:
            code = asyncio.run(_run_command(daemon, lease, tuple(command)))
        finally:
            with contextlib.suppress(LlmuxError):  # else the lease ends by its time to live
                daemon.call(operations.END_LEASE, id=lease.id)
    return code


async def _run_command(daemon: Client, lease: Lease, command: tuple[str, ...]) -> int:
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="llmux-lease-") as folder, _copied_stdio() as stdio:
        order = SpawnOrder(
            instance=lease.id,
            model=lease.id,
            generation=1,
            argv=command,
            env={**os.environ, **lease.env},
            log=Path(folder, "unused.log"),
            stdio=stdio,
            dies_first=False,  # the command is the user's, not the daemon's
        )
        signals = asyncio.Queue[None]()
        on_signals(lambda: signals.put_nowait(None), signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        process = await spawn(order)
        ending = asyncio.create_task(_end_on_signals(process, signals))
        beating = asyncio.create_task(_send_heartbeats(daemon, lease, process))
        code = (await process.wait()).code
        for task in (beating, ending):
            task.cancel()
        await asyncio.wait({beating, ending})
    if code is None:
        return SIGNALLED + signal.SIGKILL
    return code if code >= 0 else SIGNALLED - code


async def _end_on_signals(process: WorkerProcess, signals: asyncio.Queue[None]) -> None:
    """At the first signal, send SIGTERM to the command's tree and wait without limit; at the second one, send SIGKILL."""
    await signals.get()
    process.terminate()
    await signals.get()
    process.kill()


async def _send_heartbeats(daemon: Client, lease: Lease, process: WorkerProcess) -> None:
    """Send heartbeats until the lease has ended; then stop the command."""
    is_heard, interval_s, beat = True, lease.ttl_s / 3, LeaseRenewal(pid=process.shim_pid)
    while True:
        try:
            await asyncio.to_thread(daemon.call, operations.RENEW_LEASE, beat, id=lease.id)
            is_heard = True
        except NotFoundError as error:
            click.echo(f"llmux: {error.message}", err=True)
            await process.stop(GRACE_S, KILL_WAIT_S)
            return
        except LlmuxError as error:
            if is_heard:
                click.echo(f"llmux: no heartbeat reached the daemon; trying again: {error.message}", err=True)
            is_heard = False
        await asyncio.sleep(interval_s if is_heard else min(1.0, interval_s))


@contextlib.contextmanager
def _copied_stdio() -> Iterator[tuple[int, int, int]]:
    """Copies of our stdin, stdout and stderr, with numbers that the shim's pipes don't use."""
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in range(3)]
    try:
        yield copies[0], copies[1], copies[2]
    finally:
        for copy in copies:
            os.close(copy)
