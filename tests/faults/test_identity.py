"""What belongs to a daemon, and what only looks like it: copies of its directory, readers of its logs, hidden children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, fake, wait_until
from tests.support.limits import LIMIT_S
from tests.support.trees import state

TREE = fake("--daemonize", "--fork", grace_s=0.2)

HIDES = """
import os, sys
where, keeps_output, *command = sys.argv[1:]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if keeps_output == "no":
            for number in (1, 2):
                os.dup2(0, number)
        with open(where + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(where + ".new", where)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.execv(command[0], command)
"""


def hiding(pid_file: Path, *, keeps_output: bool) -> dict[str, object]:
    """A fake worker with a child that nothing ties to it: double-forked, in a session of its own, without environment."""
    model = fake()
    start = [sys.executable, "-I", "-S", "-c", HIDES, str(pid_file), "yes" if keeps_output else "no"]
    return {**model, "cmd": [*start, *model["cmd"]]}


@pytest.fixture
def daemons(tmp_path):
    """`daemons(name, models)` makes one; all are stopped at the end."""
    made: list[Daemon] = []

    def make(name: str, models: dict[str, object], **keys: object) -> Daemon:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Daemon(folder, {"models": models}, **keys))
        return made[-1]

    yield make
    for daemon in made:
        daemon.stop()
    wait_until(lambda: not any(daemon.workers() for daemon in made), what="no worker is left")


def load(daemon: Daemon, name: str) -> dict[str, int]:
    daemon.post(f"/v1/admin/models/{name}/load").raise_for_status()
    return daemon.model(name)["worker"]


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


class TestCopiedDirectory:
    """A copy of a state directory is another instance."""

    def test_workers_of_the_first_daemon_live_on(self, daemons):
        first, second = daemons("first", {"tree": TREE}).start(), daemons("second", {"tree": TREE})
        load(first, "tree")
        workers = set(first.workers())
        subprocess.run(["cp", "-a", first.state_dir, second.state_dir], check=True)
        second.start()
        assert second.instance != first.instance
        load(second, "tree")
        assert set(first.workers()) == workers
        assert first.chat("tree").status_code == 200
        assert second.stop() == 0
        assert set(first.workers()) == workers


def test_a_second_daemon_is_refused_also_where_somebody_removed_the_lock(daemons):
    first, second = daemons("first", {"tree": TREE}).start(), daemons("second", {"tree": TREE})
    load(first, "tree")
    workers = set(first.workers())
    (first.state_dir / "instance.lock").unlink()
    second.state_dir, second.config["server"]["state_dir"] = first.state_dir, str(first.state_dir)
    second.start(wait=False)
    assert second.process.wait(LIMIT_S) != 0
    assert f"another llmux runs on {first.state_dir}, whose instance.lock was removed" in second.log_text()
    assert all(map(is_alive, workers))
    assert first.chat("tree").status_code == 200


class TestLivingDaemon:
    """Nothing of a living daemon is reaped, whatever marks it inherited."""

    def test_one_that_was_started_with_marks_of_another(self, daemons):
        first = daemons("first", {"tree": TREE}).start()
        second = daemons("second", {"tree": TREE}, env={"LLMUX_INSTANCE": first.instance})
        second.by_exec = True  # the mark is in its `environ`
        second.start()
        load(second, "tree")
        workers = set(second.workers())
        first.kill()
        first.start()
        assert second.process.poll() is None
        assert set(second.workers()) == workers
        assert second.chat("tree").status_code == 200


class TestStrangers:
    """A process isn't ours because its output lies in the folder of the logs."""

    def test_somebody_who_writes_beside_the_logs_survives(self, daemons):
        daemon = daemons("first", {"tree": TREE}).start()
        load(daemon, "tree")
        logs = daemon.state_dir / "logs"
        with (logs / "filtered").open("ab") as notes, (logs / "tree.log").open("ab") as log:
            strangers = [
                subprocess.Popen(["tail", "-f", str(logs / "tree.log")], stdout=notes, env={}),
                subprocess.Popen(["/bin/sleep", "600"], stdout=log, env={}),
            ]
        try:
            worker = daemon.model("tree")["worker"]
            os.kill(worker["shim_pid"], signal.SIGKILL)
            daemon.wait_gone("tree", worker["pid"])
            daemon.kill()
            daemon.start()
            assert daemon.stop() == 0
            assert [stranger.poll() for stranger in strangers] == [None, None]
        finally:
            for stranger in strangers:
                stranger.kill()
                stranger.wait()


class TestHiddenChildren:
    """A child that cleared its environment and left its session dies with its worker all the same."""

    @pytest.mark.parametrize("keeps_output", [True, False])
    def test_after_its_shim_was_killed(self, daemons, tmp_path, keeps_output):
        pid_file = tmp_path / "hidden"
        daemon = daemons("first", {"hiding": hiding(pid_file, keeps_output=keeps_output), "other": TREE}).start()
        load(daemon, "other")
        others = set(daemon.workers())
        worker = load(daemon, "hiding")
        hidden = int(pid_file.read_text())
        os.kill(worker["shim_pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(hidden), what="the hidden child is gone")
        assert others <= set(daemon.workers()), "another worker's processes are left alone"
        assert daemon.chat("other").status_code == 200

    def test_after_its_shim_and_the_daemon_were_killed(self, daemons, tmp_path):
        """By its output. (Where it has redirected that as well, nothing proves whose it was, outside of a control group.)"""
        pid_file = tmp_path / "hidden"
        daemon = daemons("first", {"hiding": hiding(pid_file, keeps_output=True)}).start()
        shim = load(daemon, "hiding")["shim_pid"]
        hidden = int(pid_file.read_text())
        os.kill(shim, signal.SIGSTOP)  # else it is quicker than we are
        daemon.kill()
        os.kill(shim, signal.SIGKILL)
        assert is_alive(hidden)
        daemon.start()
        assert not is_alive(hidden)
        assert hidden in {event["pid"] for event in daemon.events("orphan.reaped")}
