"""`llmux lease`: a command that runs with memory of its own, and whatever happens leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryFile

import httpx
import pytest

from tests.support import forker
from tests.support.daemon import REPOSITORY, Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import LLMUX, llmux


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with running(tmp_path_factory.mktemp("leased"), {"models": {"idle": fake(vram_mib=3000)}}) as daemon:
        yield daemon


def leases(site: Daemon) -> list[dict]:
    return site.get("/v1/admin/leases").json()["data"]


class Begun:
    """One that runs; what it prints goes to files."""

    def __init__(self, site: Daemon, *words: str, **variables: str) -> None:
        self.stdout, self.stderr = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115  # closed by `over`
        argv = [*LLMUX[1:], "lease", "--url", site.url, *words]
        env = {**os.environ, **variables}
        with open(os.devnull) as nothing:
            streams = {"stdin": nothing, "stdout": self.stdout, "stderr": self.stderr}
            self.process = forker.start(argv, cwd=REPOSITORY, env=env, **streams)

    def expect(self, text: str) -> None:
        """Wait until this is all that it printed to stdout."""
        wait_until(lambda: os.pread(self.stdout.fileno(), 1000, 0).decode() == text, what=f"it prints {text!r}")

    def over(self) -> tuple[int, str, str]:
        """Wait for its end: its exit code, stdout and stderr."""
        try:
            code = self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
        with self.stdout, self.stderr:
            self.stdout.seek(0)
            self.stderr.seek(0)
            return code, self.stdout.read(), self.stderr.read()


def run(site: Daemon, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return llmux("lease", "--url", site.url, *words, stdin=given, timeout=LIMIT_S)


def end(site: Daemon, lease: str) -> None:
    httpx.delete(f"{site.url}/v1/admin/leases/{lease}", trust_env=False, timeout=LIMIT_S)


def marked(word: str) -> list[int]:
    """The living processes with this word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_ours = word.encode() in (entry / "environ").read_bytes().split(b"\0")
                is_alive = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
            except OSError:
                continue
            if is_ours and is_alive:
                found.append(int(entry.name))
    return found


class TestCommand:
    """It runs as if it had been started alone, but for its devices."""

    def test_its_input_output_and_exit_code_are_its_own(self, site):
        script = 'read line; echo "got $line"; echo "devices=$CUDA_VISIBLE_DEVICES." >&2; exit 7'
        told = run(site, "--vram-mib", "1000", "--", "sh", "-c", script, given="a line\n")
        assert (told.returncode, told.stdout, told.stderr) == (7, "got a line\n", "devices=.\n")
        wait_until(lambda: not leases(site), what="the lease is given back")

    def test_out_of_memory_the_kernel_prefers_it_to_nobody(self, site):
        told = run(site, "--vram-mib", "1000", "cat", "/proc/self/oom_score_adj")
        assert told.stdout == Path("/proc/self/oom_score_adj").read_text()

    def test_an_idle_model_goes_for_it(self, site):
        site.post("/v1/admin/models/idle/load")
        assert run(site, "--vram-mib", "3500", "true").returncode == 0
        assert site.model("idle")["state"] == "stopped"

    def test_one_that_a_signal_ended_exits_as_in_a_shell(self, site):
        assert run(site, "--vram-mib", "1000", "sh", "-c", "kill -9 $$").returncode == 128 + 9

    def test_one_that_is_not_there_gives_the_lease_back(self, site):
        told = run(site, "--vram-mib", "1000", "no-such-command")
        assert told.returncode == 1
        assert "No such file" in told.stderr
        wait_until(lambda: not leases(site), what="the lease is given back")

    def test_for_programs_the_lease_is_told_on_stderr(self, site):
        told = run(site, "--vram-mib", "1000", "--json", "--holder", "trainer", "echo", "out")
        assert told.stdout == "out\n"
        assert json.loads(told.stderr)["holder"] == "trainer"


class TestTaken:
    """While it runs it is shown with what it takes, and nobody else has its memory."""

    @pytest.fixture
    def held(self, site):
        command = Begun(site, "--vram-mib", "3500", "--holder", "first", "sleep", "1000")
        wait_until(lambda: any(lease["pid"] for lease in leases(site)), what="its first heartbeat")
        yield command
        command.process.kill()
        command.over()
        for lease in leases(site):
            end(site, lease["id"])
        wait_until(lambda: not leases(site), what="it is over")

    def test_ps_shows_it(self, site, held):
        wait_until(lambda: any(lease["measured_mib"] is not None for lease in leases(site)), what="it is measured")
        shown = llmux("ps", "--url", site.url).stdout
        assert "LEASE" in shown
        assert "first-" in shown

    def test_another_fails_at_once_and_says_why(self, site, held):
        told = run(site, "--vram-mib", "3500", "true")
        assert told.returncode == 75
        assert "holds 3500 MiB" in told.stderr

    def test_another_waits_for_its_end(self, site, held):
        second = Begun(site, "--vram-mib", "3500", "--wait", "echo", "mine")
        wait_until(lambda: len(leases(site)) == 2, what="it waits")
        held.process.terminate()
        assert second.over()[1] == "mine\n"
        assert held.process.wait(LIMIT_S) == 128 + signal.SIGTERM


class TestEnd:
    """Nothing of it survives `llmux lease`; and it ends when its lease does."""

    TREE = "(setsid sleep 1000 &); (sleep 1000 &); echo up; sleep 1000"

    def test_killed_with_llmux_lease(self, site, tmp_path):
        mark = f"TREE={tmp_path}"
        command = Begun(site, "--vram-mib", "500", "--", "sh", "-c", self.TREE, TREE=str(tmp_path))
        command.expect("up\n")
        command.process.kill()
        command.over()
        wait_until(lambda: not marked(mark), what="its tree is gone")
        for lease in leases(site):
            end(site, lease["id"])

    def test_asked_twice_it_is_killed(self, site):
        script = 'trap "" TERM; echo up; while true; do sleep 0.05; done'
        command = Begun(site, "--vram-mib", "500", "--", "sh", "-c", script)
        command.expect("up\n")

        def asked() -> bool:
            command.process.send_signal(signal.SIGINT)
            return command.process.poll() is not None

        wait_until(asked, what="it ends")
        assert command.over()[0] == 128 + signal.SIGKILL
        wait_until(lambda: not leases(site), what="the lease is given back")

    def test_it_ends_with_its_lease(self, site):
        command = Begun(site, "--vram-mib", "500", "sleep", "1000")
        (lease,) = wait_until(lambda: leases(site), what="it is granted")
        wait_until(lambda: leases(site)[0]["pid"], what="its first heartbeat")
        end(site, lease["id"])
        code, _, told = command.over()
        assert "its holder must stop" in told
        assert code == 128 + signal.SIGTERM

    def test_it_goes_on_while_no_daemon_answers(self, site):
        command = Begun(site, "--vram-mib", "500", "sleep", "1000")
        (lease,) = wait_until(lambda: leases(site), what="it is granted")
        wait_until(lambda: leases(site)[0]["pid"], what="its first heartbeat")
        site.kill()
        site.start()
        assert [one["id"] for one in leases(site)] == [lease["id"]]
        wait_until(lambda: leases(site)[0]["expires_s"] > lease["ttl_s"] * 0.9, what="a heartbeat")
        assert command.process.poll() is None
        command.process.terminate()
        command.over()
