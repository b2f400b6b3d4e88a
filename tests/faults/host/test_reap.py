"""After any kill -9 no process is left, and no other process is ever killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.errors import LlmuxError
from supervisor.host.process import reap
from supervisor.host.process.reap import Hunt, Mark, Proc, instance_lock, marked, open_same, reap_leftovers
from supervisor.host.store import files
from tests.support.counts import times
from tests.support.trees import FAKE_WORKER, PYTHON, state, survivors, wait_until

REPOSITORY = Path(__file__).parents[3]


def restarting(instance: str, folder: Path, workers: int, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.parents", "restart", instance, str(folder), str(workers), mode]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def stranger(instance):
    """A process that is no worker, although it has another instance's mark."""
    process = subprocess.Popen(["/bin/sleep", "600"], env={"LLMUX_INSTANCE": f"{instance}-other"})
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


def marked_process(instance: str, *switches: str) -> subprocess.Popen[bytes]:
    command = [*PYTHON, str(FAKE_WORKER), "--no-listen", *switches]
    return subprocess.Popen(command, env={"LLMUX_INSTANCE": instance, "LLMUX_WORKER": "m:1"}, stdout=subprocess.DEVNULL)


class Test01DaemonKilled:
    """kill -9 of the daemon, at any moment."""

    @pytest.mark.soak
    def test_its_trees_die_with_it(self, instance, tmp_path, stranger, measured):
        """Setsid double forks that ignore SIGTERM, killed in every phase of start and stop."""
        seed = random.Random(1)
        slowest = 0.0
        for _ in range(times(8, 200)):
            with restarting(instance, tmp_path, 3, "restless") as daemon:
                daemon.stdout.readline()
                time.sleep(seed.uniform(0.0, 0.4))
                daemon.kill()
                slowest = max(slowest, wait_until(lambda: not survivors(instance)))
        measured(kills=times(8, 200), orphans_gone_max_s=slowest)
        assert slowest < 10.0


class Test02DaemonAndShimsKilled:
    """The next start reaps all survivors of daemon and shims, within a second."""

    @pytest.mark.soak
    def test_with_its_shims_the_next_start_reaps_all(self, instance, tmp_path, stranger, measured):
        """No process is left that could clean up."""
        slowest = 0.0
        for _ in range(times(3, 40)):
            with restarting(instance, tmp_path, 3, "steady") as daemon:
                daemon.stdout.readline()
                started = [json.loads(daemon.stdout.readline()) for _ in range(3)]
                # Per worker a shim, the leader, its child, and two grandchildren in sessions of their own.
                wait_until(lambda: len([line for line in survivors(instance).values() if "fake_worker" in line]) >= 12)
                daemon.send_signal(signal.SIGSTOP)
                for worker in started:
                    os.kill(worker["shim"], signal.SIGKILL)
                # The daemon can't do anything now: the leaders die by their parent-death signal.
                wait_until(lambda: all(state(worker["pid"]) in ("", "Z") for worker in started))
                daemon.kill()
            assert len(survivors(instance)) >= 6
            with instance_lock(tmp_path):
                began = time.monotonic()
                reaped = reap_leftovers(instance)
                slowest = max(slowest, time.monotonic() - began)
            assert len(reaped) >= 6
            assert all(one.has_ended and one.command for one in reaped)
            assert survivors(instance) == {}
        measured(kills=times(3, 40), reaped_max_s=slowest)
        assert slowest < 10.0


class TestReap:
    """Exactly the processes with the mark are found."""

    def test_nothing_to_do(self, instance, stranger):
        assert reap_leftovers(instance) == []

    def test_one_worker_only(self, instance):
        process = marked_process(instance)
        try:
            wait_until(lambda: marked(Mark(instance)))
            assert marked(Mark(instance, "m:2")) == []
            assert [proc.pid for proc in marked(Mark(instance, "m:1"))] == [process.pid]
        finally:
            process.kill()
            process.wait()

    def test_a_process_whose_first_thread_ended_is_found(self, instance):
        """Fault 6: /proc shows no environment and no live state, but the process still has its memory and files."""
        process = marked_process(instance, "--thread-outlives", "60")
        wait_until(lambda: state(process.pid) == "Z")
        reaped = reap_leftovers(instance)
        assert [(one.pid, one.has_ended) for one in reaped] == [(process.pid, True)]
        assert process.wait() == -signal.SIGKILL

    def test_an_inherited_log_is_a_mark_too(self, instance, tmp_path):
        """The log as its shim opens it; processes that open the log by its path, to read or to write, are left alone."""
        path = tmp_path / "m.log"
        with path.open("ab") as log, path.open("ab") as other:
            files.lock(log, shared=True)
            process = subprocess.Popen(["/bin/sleep", "600"], env={}, stdout=log)
            editor = subprocess.Popen(["/bin/sleep", "600"], env={}, stdout=other)
        assert [one.pid for one in reap_leftovers(instance, logs=tmp_path)] == [process.pid]
        assert process.wait() == -signal.SIGKILL
        assert editor.poll() is None
        editor.kill()
        editor.wait()

    def test_never_itself_or_its_ancestors(self, instance, tmp_path):
        """A daemon that one of its own workers started doesn't kill its own ancestors."""
        program = "import sys; from supervisor.host.process.reap import *; print(len(reap_leftovers(sys.argv[1])))"
        env = {"LLMUX_INSTANCE": instance, "PATH": os.environ["PATH"]}
        shell = ["/bin/sh", "-c", f'{sys.executable} -c "{program}" {instance}; echo alive']
        done = subprocess.run(shell, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["0", "alive"]

    def test_what_does_not_die_is_reported(self, instance, monkeypatch):
        process = marked_process(instance)
        wait_until(lambda: marked(Mark(instance)))
        with monkeypatch.context() as patched:
            patched.setattr(reap.signal, "pidfd_send_signal", lambda *_: None)
            reaped = reap_leftovers(instance, wait_s=0.3)
        assert [(one.pid, one.has_ended) for one in reaped] == [(process.pid, False)]
        process.kill()
        process.wait()


class Test08PidReuse:
    """The kernel may reuse a pid for another process."""

    def test_another_start_time_is_another_process(self, instance):
        process = marked_process(instance)
        wait_until(lambda: marked(Mark(instance)))
        now = Proc.read(process.pid)
        before = Proc(now.pid, now.parent, now.session, now.state, now.threads, now.started - 1, now.flags)
        assert open_same(before, Mark(instance)) is None
        pidfd = open_same(now, Mark(instance))
        assert pidfd is not None
        os.close(pidfd)
        process.kill()
        process.wait()

    def test_a_process_without_the_mark_is_left_alone(self, instance, stranger):
        assert open_same(Proc.read(stranger.pid), Mark(instance)) is None

    def test_a_reused_pid_is_not_signalled(self, instance, monkeypatch):
        """The pid of a worker seen a moment ago now belongs to another process."""
        last_pid = Path("/proc/sys/kernel/ns_last_pid")
        if not os.access(last_pid, os.W_OK):
            pytest.skip("choosing the next pid needs CAP_CHECKPOINT_RESTORE")
        worker = marked_process(instance)
        wait_until(lambda: marked(Mark(instance)))
        seen = Proc.read(worker.pid)
        worker.kill()
        worker.wait()
        for _ in range(100):
            last_pid.write_text(str(seen.pid - 1))
            other = subprocess.Popen(["/bin/sleep", "600"], env={})
            if other.pid == seen.pid:
                break
            other.kill()
            other.wait()
        else:
            pytest.skip("other processes take the pids here too fast")
        monkeypatch.setattr(reap, "marked", lambda mark: [seen])
        hunt = Hunt(Mark(instance))
        assert not hunt.round(0.1)
        assert other.poll() is None
        assert state(other.pid) not in ("", "Z")
        other.kill()
        other.wait()


class TestInstanceLock:
    """A state directory has one daemon."""

    def test_a_second_one_is_told_who_has_it(self, tmp_path):
        refused = pytest.raises(LlmuxError, match=rf"another llmux \(pid {os.getpid()}\) runs on")
        with instance_lock(tmp_path), refused, instance_lock(tmp_path):
            pass

    def test_the_id_stays(self, tmp_path):
        with instance_lock(tmp_path) as first:
            pass
        with instance_lock(tmp_path) as second:
            assert second == first

    def test_two_directories_are_two_instances(self, tmp_path):
        with instance_lock(tmp_path / "a") as a, instance_lock(tmp_path / "b") as b:
            assert a != b

    def test_a_directory_that_cannot_be(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(LlmuxError, match="can't be used"), instance_lock(tmp_path / "file" / "state"):
            pass

    def test_a_killed_holder_holds_nothing(self, instance, tmp_path):
        with restarting(instance, tmp_path, 1, "steady") as daemon:
            daemon.stdout.readline()
            daemon.stdout.readline()
            with pytest.raises(LlmuxError, match=f"pid {daemon.pid}"), instance_lock(tmp_path):
                pass
            daemon.kill()
        with instance_lock(tmp_path):  # also while its workers are still dying: they never had the lock
            pass
        wait_until(lambda: not survivors(instance))
