"""The classes of failed starts. Real processes, except for failures that no test can cause."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from supervisor.core.types import CrashClass
from supervisor.host.process import process, threads
from supervisor.host.process.process import SpawnError
from supervisor.host.process.spawn import SpawnOrder, spawn
from tests.support.cases import cases

HOST, ARGUMENTS, UNKNOWN = CrashClass.HOST, CrashClass.BAD_ARGUMENTS, CrashClass.UNKNOWN


def order(folder: Path, *argv: str, **more) -> SpawnOrder:
    return SpawnOrder("test-spawn", "m", 1, argv, folder / "logs" / "m.log", env={"PATH": "/bin:/usr/bin"}, **more)


async def refused(wanted: SpawnOrder) -> SpawnError:
    with pytest.raises(SpawnError) as caught:
        await spawn(wanted)
    return caught.value


class TestFault:
    async def test_a_missing_program(self, tmp_path):
        assert (await refused(order(tmp_path, "/no/such/program"))).kind is ARGUMENTS

    async def test_what_is_no_program(self, tmp_path):
        (tmp_path / "text").touch(0o644)
        assert (await refused(order(tmp_path, str(tmp_path / "text")))).kind is ARGUMENTS

    async def test_a_missing_working_folder(self, tmp_path):
        error = await refused(order(tmp_path, "true", cwd=tmp_path / "gone"))
        assert (error.kind, "gone" in error.message) == (UNKNOWN, True)

    async def test_a_program_that_is_being_written(self, tmp_path):
        program = tmp_path / "true"
        shutil.copy("/bin/true", program)
        with program.open("ab"):
            error = await refused(order(tmp_path, str(program)))
        assert (error.kind, "busy" in error.message) == (HOST, True)
        worker = await spawn(order(tmp_path, str(program)))
        assert (await worker.wait()).code == 0

    async def test_a_shim_that_is_killed(self, tmp_path):
        """As the kernel does it when memory is short."""
        before = children()
        starting = asyncio.create_task(spawn(order(tmp_path, "true")))
        await asyncio.sleep(0)  # it makes the shim at once
        await asyncio.sleep(0)
        (shim,) = children() - before
        os.kill(shim, signal.SIGKILL)
        with pytest.raises(SpawnError) as caught:
            await starting
        assert caught.value.kind is HOST

    @cases("code", sorted(process.HOST_TROUBLE))
    @cases("step", ["setup", "fork", "cwd", "exec"])
    def test_what_the_kernel_is_short_of(self, step, code):
        """Injected: no memory, a quota, a read-only or broken disk."""
        assert process._crash_class(step, code) is HOST

    @cases(("step", "kind"), [("setup", HOST), ("fork", HOST), ("cwd", UNKNOWN), ("exec", ARGUMENTS)])
    @cases("code", [errno.ENOENT, errno.EACCES, errno.ENOEXEC])
    def test_what_is_wrong(self, step, kind, code):
        assert process._crash_class(step, code) is kind


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


class TestLog:
    async def test_its_folder_is_made(self, tmp_path):
        worker = await spawn(order(tmp_path, "echo", "hello"))
        await worker.wait()
        assert worker.unlogged == ""
        assert (tmp_path / "logs" / "m.log").read_text() == "hello\n"
        assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700

    async def test_where_there_can_be_none(self, tmp_path):
        (tmp_path / "logs").touch()
        worker = await spawn(order(tmp_path, "sh", "-c", "echo hello || exit 7"))
        assert (await worker.wait()).code == 0
        assert "logs" in worker.unlogged

    async def test_the_umask_is_left_alone(self, tmp_path):
        worker = await spawn(order(tmp_path, "sh", "-c", "umask"))
        await worker.wait()
        before = os.umask(0)
        os.umask(before)
        assert int((tmp_path / "logs" / "m.log").read_text(), 8) == before


class TestThreads:
    async def test_none_left(self, monkeypatch):
        """Injected: what Python raises at the limit of threads is an error of the machine."""

        async def refuse(_work):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threads.asyncio, "to_thread", refuse)
        with pytest.raises(OSError, match="can't start new thread") as caught:
            await threads.in_thread(bool)
        assert caught.value.errno == errno.EAGAIN

    async def test_a_mistake_of_the_work(self):
        def mistake() -> None:
            raise RuntimeError("a mistake")

        with pytest.raises(RuntimeError, match="a mistake"):
            await threads.in_thread(mistake)


class TestStdio:
    """A program may use our own streams instead of a log."""

    async def test_it_reads_and_writes_them(self, tmp_path):
        given, stdin = os.pipe()
        stdout, said = os.pipe()
        os.write(stdin, b"a line\n")
        os.close(stdin)
        worker = await spawn(order(tmp_path, "sh", "-c", "cat; echo $$ >&2; ls /proc/$$/fd", stdio=(given, said, said)))
        for descriptor in (given, said):
            os.close(descriptor)
        assert (await worker.wait()).code == 0
        with os.fdopen(stdout, "rb") as output:
            first, pid, *descriptors = output.read().split(b"\n")
        assert (first, int(pid)) == (b"a line", worker.pid)
        assert descriptors[:3] == [b"0", b"1", b"2"]
        assert (tmp_path / "logs" / "m.log").read_bytes() == b""
