"""A shim that is handed over: the daemon whose death ends its tree, and times when no death does."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from supervisor.host.process.fd_channel import ChannelClosedError, FdChannel, FdListener, connect
from supervisor.host.process.process import AdoptedShim, ProcessExit, WorkerProcess
from supervisor.host.process.reap import Mark
from tests.support.limits import LIMIT_S
from tests.support.trees import state, survivors, until, wait_until

LONG = f"keep {LIMIT_S:.0f}"


class Lent:
    """A worker with a separate process as parent, and its descriptors in this process."""

    def __init__(self, instance: str, folder: Path) -> None:
        self.instance, self.folder = instance, folder
        self.parent: subprocess.Popen[bytes]
        self.descriptors: tuple[int, ...] = ()
        self.pid = self.shim = 0

    async def begin(self, *lines: str) -> Lent:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [sys.executable, "-m", "tests.support.parents", "lend", self.instance, str(self.folder)]
        with theirs:
            self.parent = subprocess.Popen([*program, str(theirs.fileno()), *lines], pass_fds=(theirs.fileno(),))
        channel = FdChannel(ours)
        facts, self.descriptors = await channel.receive(3)
        channel.close()
        self.pid, self.shim = facts["pid"], facts["shim"]
        await until(lambda: len(self.tree()) == 4)  # shim, leader, child and detached grandchild
        return self

    def tree(self) -> dict[int, str]:
        return survivors(self.instance)

    def tell(self, line: str) -> None:
        os.write(self.descriptors[0], line.encode())

    def kill_parent(self) -> None:
        self.parent.kill()
        self.parent.wait()

    def let_go(self) -> None:
        while self.descriptors:
            os.close(self.descriptors[0])
            self.descriptors = self.descriptors[1:]

    async def gone(self) -> None:
        await until(lambda: not self.tree())


@pytest.fixture
def lent(instance, tmp_path) -> Iterator[Lent]:
    lent = Lent(instance, tmp_path)
    yield lent
    lent.kill_parent()
    lent.let_go()
    wait_until(lambda: not lent.tree())


@pytest.fixture
def heir() -> Iterator[subprocess.Popen[bytes]]:
    """A process that adopts the worker: the shim accepts any process."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def unread(descriptor: int) -> int:
    """The bytes of commands that the shim has not read yet."""
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]


async def heard(lent: Lent) -> None:
    await until(lambda: unread(lent.descriptors[0]) == 0)
    await until(lambda: state(lent.shim) == "S")  # it is back in its loop, so it has obeyed


class TestWhoseDeathCounts:
    async def test_the_parents_whoever_holds_the_pipe(self, lent):
        """Without an announced hand-over, another process with the pipe changes nothing."""
        await lent.begin()
        lent.kill_parent()
        await lent.gone()

    async def test_nobodys_while_it_is_kept(self, lent, heir):
        await lent.begin(LONG)
        await heard(lent)
        lent.kill_parent()
        lent.tell(f"adopt {heir.pid}\n")
        await heard(lent)
        await until(lambda: len(lent.tree()) == 4)

    async def test_the_parents_again_when_nobody_adopts(self, lent):
        began_at = time.monotonic()
        await lent.begin("keep 1")
        await heard(lent)
        lent.kill_parent()
        await lent.gone()
        assert time.monotonic() - began_at >= 1.0

    async def test_the_parent_lives_and_nobody_adopts(self, lent):
        """The worker goes on, and the parent's death counts as before."""
        await lent.begin("keep 1")
        await asyncio.sleep(1.3)  # the time is over: nothing shows that from outside
        await until(lambda: len(lent.tree()) == 4)
        lent.kill_parent()
        await lent.gone()

    async def test_the_successors(self, lent, heir):
        await lent.begin(LONG)
        lent.tell(f"adopt {heir.pid}\n")
        await heard(lent)
        lent.kill_parent()
        await until(lambda: len(lent.tree()) == 4)
        heir.kill()
        await lent.gone()

    async def test_a_successor_that_is_dead_already(self, lent, heir):
        heir.kill()
        heir.wait()
        await lent.begin(LONG)
        lent.tell(f"adopt {heir.pid}\n")
        await lent.gone()

    async def test_the_last_successors_alone(self, lent, heir):
        """An earlier daemon may end at any moment after it has sent `keep`."""
        await lent.begin(LONG)
        with subprocess.Popen(["sleep", "1000"]) as first:
            lent.tell(f"adopt {first.pid}\n{LONG}\n")
            await heard(lent)
            first.kill()
        lent.kill_parent()
        lent.tell(f"adopt {heir.pid}\n")
        await heard(lent)
        await until(lambda: len(lent.tree()) == 4)
        heir.kill()
        await lent.gone()

    async def test_nobody_holds_the_pipe(self, lent):
        """End of file ends the tree also while it is kept."""
        await lent.begin(LONG)
        await heard(lent)
        lent.let_go()
        lent.kill_parent()
        await lent.gone()

    async def test_commands_come_joined_and_cut(self, lent, heir):
        await lent.begin()
        for part in (f"{LONG}\nado", f"pt {heir.pid}", "\n"):
            lent.tell(part)
            await heard(lent)
        lent.kill_parent()
        await until(lambda: len(lent.tree()) == 4)
        heir.kill()
        await lent.gone()


class TestAdoptedProcess:
    """`WorkerProcess` around a shim that is not our child."""

    @pytest.fixture
    async def adopted(self, lent) -> AsyncIterator[WorkerProcess]:
        await lent.begin(LONG)
        stdin, stdout, pidfd = (os.dup(descriptor) for descriptor in lent.descriptors)
        lent.let_go()
        mark = Mark(lent.instance, "fake:1", lent.folder / "fake-1.log")
        shim = AdoptedShim(lent.shim, stdin, stdout, pidfd)
        process = WorkerProcess.adopt("fake:1", mark, None, shim, lent.pid, time.monotonic(), b"")
        process.send_line(b"adopt %d\n" % os.getpid())
        lent.kill_parent()
        yield process
        process.abandon()
        await process.wait()

    async def test_its_processes_are_known(self, adopted, lent):
        assert adopted.pids()[0] == lent.pid
        await until(lambda: len(adopted.pids()) == 3)

    async def test_it_is_stopped(self, adopted):
        assert await adopted.stop(0.0) == ProcessExit(-signal.SIGKILL, killed=True)

    async def test_its_end_is_seen(self, adopted, lent):
        os.kill(lent.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(adopted.wait(), LIMIT_S)).code == -signal.SIGKILL

    async def test_a_killed_shim_is_cleared_up_after(self, adopted, lent):
        """Another process adopts its orphans, so only the hunt by the mark finds these."""
        os.kill(lent.shim, signal.SIGKILL)
        end = await asyncio.wait_for(adopted.wait(), LIMIT_S)
        assert (end.code, end.killed) == (None, False)
        assert not lent.tree()


class TestChannel:
    async def test_descriptors_and_messages_arrive_as_they_were(self, tmp_path):
        met = asyncio.get_running_loop().create_future()
        deep = tmp_path / ("a" * 120)  # longer than a socket's address may be
        deep.mkdir()
        listener = FdListener(deep / "socket", met.set_result)
        connection = connect(deep / "socket")
        assert connection is not None
        here, there = FdChannel(connection), await met
        assert there.pid == os.getpid()
        assert (deep / "socket").stat().st_mode & 0o777 == 0o600
        read, write = os.pipe()
        long = {"text": "x" * 300_000}
        await here.send(long, (write,))
        await here.send({"second": 1})
        content, (passed,) = await there.receive(1)
        assert content == long
        assert not os.get_inheritable(passed)
        os.write(passed, b"through")
        assert os.read(read, 100) == b"through"
        assert await there.receive() == ({"second": 1}, ())
        here.close()
        with pytest.raises(ChannelClosedError):
            await there.receive()
        there.close()
        listener.close()
        assert connect(deep / "socket") is None
        for descriptor in (read, write, passed):
            os.close(descriptor)
