"""A worker keeps the environment it was started from, as real processes: installed over, removed, killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from pathlib import Path

import pytest

from supervisor.host.environments import env_lease, venvs
from supervisor.host.environments.env_lease import RECORD, EnvironmentRemovedError, EnvLease
from supervisor.host.process.spawn import SpawnOrder, spawn
from tests.installation.test_venvs import lock as lock  # a fixture
from tests.installation.test_venvs import quiet
from tests.support.trees import until

pytestmark = pytest.mark.usefixtures("subreaper")

LATE = """
import sys
print("ready", flush=True)
open(sys.argv[1]).read()  # until somebody has something to say
import worker
print("imported", worker.version, flush=True)
open(sys.argv[1]).read()
"""


class Late:
    """A worker that imports its library on command."""

    def __init__(self, folder: Path, environment: Path, instance: str, generation: int = 1) -> None:
        self.fifo = folder / f"fifo-{generation}"
        os.mkfifo(self.fifo)
        self.log = folder / f"late-{generation}.log"
        python = str(environment / "bin" / "python")
        self.lease = EnvLease.on(python)
        assert self.lease is not None
        argv = (python, "-I", "-c", LATE, str(self.fifo))
        self.order = SpawnOrder(instance, "late", generation, argv, self.log, keeps=(self.lease.record.fileno(),))

    async def start(self):
        process = await spawn(self.order)
        self.lease.record.close()  # from here on only shim and worker have it
        await until(lambda: "ready" in self.log.read_text())
        return process

    async def imported(self) -> str:
        await asyncio.to_thread(self.fifo.write_text, "now")
        await until(lambda: "imported" in self.log.read_text() or "Error" in self.log.read_text())
        return self.log.read_text().splitlines()[-1]


def builds(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "runtimes/.envs/demo").iterdir() if entry.is_dir())


class TestInUse:
    """An environment is removed when the last worker that uses it has ended, not before."""

    async def test_installed_over(self, lock, tmp_path, instance):
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        worker = Late(tmp_path, old.path, instance)
        process = await worker.start()
        new = venvs.install(lock("2.0"), tmp_path / "runtimes", quiet)
        assert venvs.installed("demo", tmp_path / "runtimes") == new
        assert builds(tmp_path) == sorted([old.path.name, new.path.name])
        assert venvs.still_used("demo", tmp_path / "runtimes") == (old.path,)
        assert env_lease.models(old.path) == ("late",)
        assert await worker.imported() == "imported 1.0"
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert venvs.still_used("demo", tmp_path / "runtimes") == ()
        venvs.sweep_in_background(tmp_path / "runtimes").join(30)
        assert builds(tmp_path) == [new.path.name]

    async def test_removed(self, lock, tmp_path, instance):
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        worker = Late(tmp_path, old.path, instance)
        process = await worker.start()
        assert venvs.remove("demo", tmp_path / "runtimes")
        assert venvs.installed("demo", tmp_path / "runtimes") is None
        assert await worker.imported() == "imported 1.0"
        os.kill(process.shim_pid, signal.SIGKILL)
        await process.wait()
        assert not venvs.remove("demo", tmp_path / "runtimes")
        assert builds(tmp_path) == []

    async def test_the_last_one_takes_it_away(self, lock, tmp_path, instance):
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        workers = [Late(tmp_path, old.path, instance, number) for number in (1, 2)]
        processes = [await spawn(worker.order) for worker in workers]
        new = venvs.install(lock("2.0"), tmp_path / "runtimes", quiet)
        for worker, process, left in zip(workers, processes, (2, 1), strict=True):
            await process.stop(0.0)
            assert len(builds(tmp_path)) == 2
            venvs.give_back(worker.lease)
            await until(lambda left=left: len(builds(tmp_path)) == left)
        assert builds(tmp_path) == [new.path.name]

    async def test_a_lease_that_comes_too_late(self, lock, tmp_path):
        """A lease during the removal of a replaced environment raises EnvironmentRemovedError."""
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        with env_lease.retire(old.path) as ours:
            assert ours
            assert EnvLease.on(str(old.interpreter)) is None
        venvs.install(lock("2.0"), tmp_path / "runtimes", quiet)
        live = tmp_path / "runtimes" / "demo"
        with (live / RECORD).open("r+b") as removing:
            fcntl.flock(removing, fcntl.LOCK_EX)
            asking = asyncio.create_task(asyncio.to_thread(EnvLease.on, str(live / "bin" / "python")))
            await until(lambda: waiting(live.resolve() / RECORD))
            (live / RECORD).unlink()
        with pytest.raises(EnvironmentRemovedError):
            await asking

    def test_programs_from_elsewhere(self, tmp_path):
        unknown = str(tmp_path / ".envs" / "x" / "y" / "bin" / "python")
        for program in ("/bin/true", "/true", "true", "./true", "/", unknown):
            assert EnvLease.on(program) is None

    def test_from_one_that_is_half_removed(self, lock, tmp_path):
        """An environment without its record counts as being removed: no worker can start from it."""
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        new = tmp_path / "runtimes/.envs/demo/new"
        new.mkdir()
        (tmp_path / "runtimes/demo").unlink()
        (tmp_path / "runtimes/demo").symlink_to(new)
        with env_lease.retire(old.path), pytest.raises(EnvironmentRemovedError):
            EnvLease.on(str(old.interpreter))


def waiting(record: Path) -> bool:
    """Does a process wait for the file's lock?"""
    inode = f":{record.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())
