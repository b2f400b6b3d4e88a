"""Workers as real processes: started, stopped, killed, and confirmed to be gone. Runs on both event loops."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from supervisor.host.process import cgroup, shim
from supervisor.host.process.ports import PortRange
from supervisor.host.process.process import SpawnError, UnkillableError
from supervisor.host.process.spawn import SpawnOrder, spawn
from tests.support.counts import times
from tests.support.ports import quiet_ports
from tests.support.trees import order, state, survivors, until

pytestmark = pytest.mark.usefixtures("subreaper")


async def ready(path: Path) -> None:
    """Wait until the fake worker reports that it is up."""
    await until(lambda: path.exists() and any(word in path.read_text() for word in ("ready\n", "listening on")))


class TestSpawn:
    """A started worker runs its order, has our mark, and other users can't read its keys."""

    async def test_runs_marked_below_its_shim(self, instance, tmp_path, descriptors):
        worker = await spawn(order(instance, tmp_path, "--log-env", env={"KEY": "secret-1"}, generation=7))
        await ready(tmp_path / "fake-7.log")
        env = json.loads((tmp_path / "fake-7.log").read_text().splitlines()[1])
        assert env["LLMUX_INSTANCE"] == instance
        assert env["LLMUX_WORKER"] == "fake:7"
        assert env["KEY"] == "secret-1"
        assert "HOME" not in env
        assert worker.pids() == (worker.pid,)
        assert set(survivors(instance)) == {worker.pid, worker.shim_pid}
        await worker.stop(5.0)

    async def test_keys_are_in_no_argv_and_not_in_the_shim(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, env={"KEY": "secret-2"}))
        for pid in (worker.pid, worker.shim_pid):
            assert b"secret-2" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"secret-2" not in Path(f"/proc/{worker.shim_pid}/environ").read_bytes()
        await worker.stop(5.0)

    async def test_dumps_no_core_and_reads_nothing(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, cwd=tmp_path))
        limits = Path(f"/proc/{worker.pid}/limits").read_text()
        core = next(line for line in limits.splitlines() if line.startswith("Max core file size")).split()
        assert core[4:6] == ["0", "0"]
        assert os.readlink(f"/proc/{worker.pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{worker.pid}/cwd") == str(tmp_path)
        await ready(tmp_path / "fake-1.log")
        assert sorted(os.listdir(f"/proc/{worker.pid}/fd")) == ["0", "1", "2"]
        await worker.stop(5.0)

    async def test_an_environment_larger_than_a_pipe(self, instance, tmp_path):
        big = {f"BIG_{i}": "x" * 30_000 for i in range(10)}
        worker = await spawn(order(instance, tmp_path, env=big))
        await worker.stop(5.0)

    async def test_what_cannot_be_run_is_an_error_that_names_it(self, instance, tmp_path, descriptors):
        with pytest.raises(SpawnError, match=r"^\[Errno 2\] .*'/no/such/program'$"):
            await spawn(SpawnOrder(instance, "m", 1, ("/no/such/program",), tmp_path / "log"))
        with pytest.raises(SpawnError, match="'/no/such/dir'"):
            await spawn(SpawnOrder(instance, "m", 1, ("/bin/true",), tmp_path / "log", cwd=Path("/no/such/dir")))

    async def test_the_shim_is_small(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path))
        status = Path(f"/proc/{worker.shim_pid}/status").read_text()
        rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        assert rss_kib < 16 * 1024
        await worker.stop(5.0)

    async def test_a_start_begins_with_an_empty_log_and_keeps_the_last_one(self, instance, tmp_path):
        for text in ("first", "second"):
            worker = await spawn(order(instance, tmp_path, "--log-text", text, "--exit-code", "3"))
            end = await worker.wait()
            assert (end.code, end.killed) == (3, False)
        assert "second" in (tmp_path / "fake-1.log").read_text()
        assert "first" not in (tmp_path / "fake-1.log").read_text()
        assert "first" in (tmp_path / "fake-1.log.1").read_text()


class Test11CancelledSpawn:
    """A spawn that is cancelled at any moment leaves no process."""

    @pytest.mark.soak
    async def test_cancelled_spawns_leave_nothing(self, instance, tmp_path, descriptors, measured):
        seed = random.Random(11)

        async def one(generation: int) -> None:
            task = asyncio.create_task(spawn(order(instance, tmp_path, "--daemonize", generation=generation)))
            await asyncio.sleep(seed.uniform(0.0, 0.12))
            if not task.cancel():
                await (await task).stop(0.0)
            await asyncio.gather(task, return_exceptions=True)

        count = times(24, 500)
        for first in range(0, count, 8):
            await asyncio.gather(*(one(generation) for generation in range(first, min(first + 8, count))))
        await until(lambda: not survivors(instance))
        await until(lambda: len(asyncio.all_tasks()) == 1)
        measured(cancelled=count, leaked=0)


class TestStop:
    """A stop terminates first and kills then; it is over when the last process of the tree is gone."""

    async def test_ends_politely(self, instance, tmp_path, descriptors):
        worker = await spawn(order(instance, tmp_path))
        await ready(tmp_path / "fake-1.log")
        end = await worker.stop(10.0)
        assert (end.code, end.killed) == (0, False)
        assert await worker.wait() == end
        assert await worker.stop(0.0) == end

    async def test_a_leader_that_ends_takes_everything_along(self, instance, tmp_path):
        worker = await spawn(
            order(instance, tmp_path, "--daemonize", "2", "--fork", "2", "--leader-exits-after", "0.2")
        )
        assert (await worker.wait()).code == 0
        assert survivors(instance) == {}

    async def test_a_tree_that_forks_away_is_caught(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--respawn"))
        await ready(tmp_path / "fake-1.log")
        await worker.stop(1.0, kill_wait_s=20.0)
        assert survivors(instance) == {}

    async def test_kill_cuts_the_grace_short(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--ignore-term"))
        await ready(tmp_path / "fake-1.log")
        stopping = asyncio.create_task(worker.stop(60.0))
        await until(lambda: "ignoring SIGTERM" in (tmp_path / "fake-1.log").read_text())
        worker.kill()
        assert (await stopping).killed

    async def test_a_stop_program_goes_before_sigterm(self, instance, tmp_path):
        asked = tmp_path / "asked"
        program = f"import os; print('asked', flush=True); open({str(asked)!r}, 'w').write(f'{{os.getpid()}} ')"
        command = (sys.executable, "-I", "-S", "-c", program)
        worker = await spawn(order(instance, tmp_path, "--ignore-term", stop_argv=command))
        await ready(tmp_path / "fake-1.log")
        stopping = asyncio.create_task(worker.stop(60.0))
        await until(lambda: asked.exists() and asked.read_text().endswith(" "))
        await until(lambda: state(int(asked.read_text())) == "")
        worker.kill()
        assert (await stopping).killed
        assert "asked" in (tmp_path / "fake-1.log").read_text()
        assert "ignoring SIGTERM" not in (tmp_path / "fake-1.log").read_text()

    @pytest.mark.parametrize("command", [("/bin/false",), ("/no/such/program",)])
    async def test_a_stop_program_that_fails_is_followed_by_sigterm(self, instance, tmp_path, command):
        worker = await spawn(order(instance, tmp_path, stop_argv=command))
        await ready(tmp_path / "fake-1.log")
        end = await worker.stop(20.0)
        assert (end.code, end.killed) == (0, False)

    async def test_a_slow_stop_delays_no_other(self, instance, tmp_path):
        slow = await spawn(order(instance, tmp_path, "--ignore-term", generation=1))
        quick = await spawn(order(instance, tmp_path, generation=2))
        await ready(tmp_path / "fake-1.log")
        await ready(tmp_path / "fake-2.log")
        stopping = asyncio.create_task(slow.stop(60.0))
        await quick.stop(30.0)
        assert not stopping.done()
        slow.kill()
        await stopping

    async def test_a_stopped_shim_is_replaced_by_the_hunt(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--daemonize"))
        await ready(tmp_path / "fake-1.log")
        os.kill(worker.shim_pid, signal.SIGSTOP)
        await worker.stop(0.1, kill_wait_s=8.0)
        assert survivors(instance) == {}

    async def test_a_sigstopped_tree_dies_too(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--fork"))
        await ready(tmp_path / "fake-1.log")
        for pid in worker.pids():
            os.kill(pid, signal.SIGSTOP)
        assert (await worker.stop(0.2)).killed


class Test03GrandchildHoldsStdout:
    """A stop is over when the tree is gone, even if another process has its output open."""

    async def test_a_grandchild_that_holds_stdout_delays_nothing(self, instance, tmp_path, measured):
        """The leader obeys, its detached grandchild ignores SIGTERM and keeps the log open."""
        worker = await spawn(order(instance, tmp_path, "--daemonize", "--fork"))
        await ready(tmp_path / "fake-1.log")
        await until(lambda: len(worker.pids()) == 3)
        began = time.monotonic()
        end = await worker.stop(60.0)
        stopped_s = time.monotonic() - began
        assert stopped_s < 30.0
        assert end.code == 0
        measured(grace_s=60, stopped_s=stopped_s)
        assert survivors(instance) == {}


class Test04IgnoresSigterm:
    """A worker that ignores SIGTERM is killed when its grace is over."""

    async def test_ignoring_sigterm_helps_until_the_grace_is_over(self, instance, tmp_path, measured):
        worker = await spawn(order(instance, tmp_path, "--ignore-term", "--fork"))
        await ready(tmp_path / "fake-1.log")
        began = time.monotonic()
        end = await worker.stop(0.7)
        stopped_s = time.monotonic() - began
        assert 0.65 <= stopped_s < 15.0
        measured(grace_s=0.7, stopped_s=stopped_s)
        assert (end.code, end.killed) == (-signal.SIGKILL, True)


class TestDeath:
    """A process is dead only when the kernel says so."""

    async def test_a_signal_is_told_from_an_exit_code(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--exit-signal", str(int(signal.SIGABRT))))
        end = await worker.wait()
        assert (end.code, end.killed, end.oom_killed) == (-signal.SIGABRT, False, False)

    async def test_a_cancelled_wait_changes_nothing(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path))
        waiting = asyncio.create_task(worker.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(worker.pids()) == 1
        await worker.stop(5.0)

    async def test_a_killed_shim_leaves_nothing(self, instance, tmp_path, descriptors):
        worker = await spawn(order(instance, tmp_path, "--daemonize", "--fork", "--ignore-term"))
        await ready(tmp_path / "fake-1.log")
        os.kill(worker.shim_pid, signal.SIGKILL)
        end = await worker.wait()
        assert (end.code, end.killed) == (-signal.SIGKILL, False)
        assert survivors(instance) == {}

    async def test_what_dies_without_a_mark_is_waited_for(self, instance, tmp_path):
        """Threads that end lose environment and files first, then the memory: it takes a while, the more there is."""
        worker = await spawn(order(instance, tmp_path, "--take-mib", "600", "--thread-outlives", "60"))
        await until(lambda: state(worker.pid) == "Z")
        os.kill(worker.shim_pid, signal.SIGKILL)
        end = await worker.wait()
        assert state(worker.pid) == ""
        assert end.code == -signal.SIGKILL

    async def test_a_killed_shim_whose_tree_hides_its_environment(self, instance, tmp_path):
        """Programs that set their title overwrite their environment; their output still goes to the log."""
        program = "import os, time\nif os.fork() == 0:\n os.setsid()\n os.execve('/bin/sleep', ['sleep', '60'], {})\ntime.sleep(60)"
        worker = await spawn(
            SpawnOrder(instance, "m", 1, (sys.executable, "-I", "-S", "-c", program), tmp_path / "log")
        )
        await until(lambda: any("sleep" in Path(f"/proc/{pid}/comm").read_text() for pid in worker.pids()))
        hidden = worker.pids()[1]
        os.kill(worker.shim_pid, signal.SIGKILL)
        await worker.wait()
        assert state(hidden) == ""

    async def test_a_shim_told_to_end_kills_everything(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--daemonize", "--ignore-term"))
        await ready(tmp_path / "fake-1.log")
        os.kill(worker.shim_pid, signal.SIGTERM)
        assert (await worker.wait()).code == -signal.SIGKILL
        assert survivors(instance) == {}

    async def test_end_of_file_on_its_stdin_ends_a_shim(self, instance, tmp_path):
        """The daemon's death is seen this way too, should the parent-death signal not come."""
        worker = await spawn(order(instance, tmp_path, "--daemonize", "--ignore-term"))
        await ready(tmp_path / "fake-1.log")
        worker.abandon()
        assert (await worker.wait()).code == -signal.SIGKILL
        assert survivors(instance) == {}

    async def test_its_own_control_group_goes_with_it(self, instance, tmp_path):
        if cgroup.delegated() is None:
            pytest.skip("no delegated cgroup v2 here")
        worker = await spawn(order(instance, tmp_path, "--daemonize"))
        await ready(tmp_path / "fake-1.log")
        groups = {Path(f"/proc/{pid}/cgroup").read_text() for pid in worker.pids()}
        assert len(groups) == 1
        assert instance in groups.pop()
        await worker.stop(1.0)
        assert cgroup.leftover_groups(instance) == []


class Test06LeaderThreadGone:
    """A process without its first thread is no dead process."""

    async def test_a_leader_thread_that_ended_is_no_dead_process(self, instance, tmp_path):
        """State Z with live threads."""
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        program = f"import ctypes, os, threading\nend = lambda: (open({str(fifo)!r}).read(), os._exit(0))\n"
        program += "threading.Thread(target=end).start()\nctypes.CDLL(None).pthread_exit(None)"
        argv = (sys.executable, "-I", "-S", "-c", program)
        worker = await spawn(SpawnOrder(instance, "m", 1, argv, tmp_path / "log"))
        await until(lambda: state(worker.pid) == "Z")
        assert worker.pids() == (worker.pid,)
        waiting = asyncio.create_task(worker.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(fifo.write_text, "the end")
        assert (await waiting).code == 0
        assert state(worker.pid) == ""

    async def test_a_leader_thread_that_ended_can_be_killed(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--thread-outlives", "60"))
        await until(lambda: state(worker.pid) == "Z")
        assert (await worker.stop(0.0)).killed


class Test07Unkillable:
    """A process that survives SIGKILL is never reported as gone."""

    async def test_what_cannot_be_killed_is_said_and_never_called_gone(
        self, instance, tmp_path, descriptors, monkeypatch
    ):
        """A process whose pidfd does not fire."""
        silent, fire = os.pipe()
        monkeypatch.setattr(os, "pidfd_open", lambda pid: silent)
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        worker = await spawn(order(instance, tmp_path))
        with pytest.raises(UnkillableError, match=r"^still there 0\.4 s after SIGKILL"):
            await worker.stop(0.0, kill_wait_s=0.4)
        waiting = asyncio.create_task(worker.wait())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        os.write(fire, b"!")
        os.close(fire)
        assert (await waiting).killed


class Test12LogFlood:
    """A worker writes as much as it likes: it never blocks, and the disk never fills."""

    async def test_a_flood_stays_bounded(self, instance, tmp_path):
        limit, log = 1 << 20, tmp_path / "fake-1.log"
        worker = await spawn(order(instance, tmp_path, "--flood", log_limit=limit))
        io = Path(f"/proc/{worker.pid}/io")
        largest = written = 0
        # How large it gets depends on how often the machine lets the shim look; all that was written it never is.
        while written < max(times(192, 4096) << 20, 3 * largest):
            largest = max(largest, size(log) + size(tmp_path / "fake-1.log.1"))
            assert largest < 2 << 30
            await asyncio.sleep(0.001)
            written = int(io.read_text().split("wchar: ")[1].split()[0])
        assert largest > limit
        await worker.stop(5.0)
        assert size(log) <= limit
        assert size(tmp_path / "fake-1.log.1") == limit // 2

    def test_a_signal_while_it_is_shortened(self, tmp_path, monkeypatch):
        """The kernel copies only a part then."""
        copy, said = os.sendfile, b"".join(b"line %d\n" % number for number in range(10_000))
        monkeypatch.setattr(os, "sendfile", lambda *way: copy(*way[:3], min(way[3], 1000)))
        log = shim.Log(str(tmp_path / "log"), limit=1 << 16)
        (tmp_path / "log").write_bytes(said)
        log.look()
        assert (tmp_path / "log.1").read_bytes() == said[-(1 << 15) :]
        assert size(tmp_path / "log") == 0
        os.close(log.fd)
        os.close(log.inotify)

    async def test_little_is_kept_whole(self, instance, tmp_path):
        worker = await spawn(order(instance, tmp_path, "--log-text", "hello", log_limit=1 << 20))
        await ready(tmp_path / "fake-1.log")
        assert "hello\nready\n" in (tmp_path / "fake-1.log").read_text()
        assert not (tmp_path / "fake-1.log.1").exists()
        await worker.stop(5.0)

    async def test_it_serves_while_it_floods(self, instance, tmp_path):
        first = quiet_ports(10)
        port = PortRange(first, first + 9).lease("flood")
        worker = await spawn(order(instance, tmp_path, "--flood", "--port", str(port), log_limit=1 << 20))

        def healthy() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    return answer.status == 200
            except OSError:
                return False

        while not await asyncio.to_thread(healthy):
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(healthy)
        assert (await worker.stop(0.0)).killed


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
