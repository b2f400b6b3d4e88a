"""A runtime is installed anew while a daemon runs models from it: nobody notices, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.cli.environments import environments
from supervisor.host.environments import venvs
from supervisor.host.environments.recipe import Recipe
from tests.support import tiny
from tests.support.daemon import REPOSITORY, Daemon, gguf, running, wait_until

NAME = "llama_server"


@pytest.fixture
def change(tmp_path):
    """Install the real runtime from a lock that says the same in other words, each time: another environment."""
    folder = tmp_path / "locks"
    shutil.copytree(environments.recipe_of(NAME).lock.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    lock = folder / "requirements.lock"

    def install() -> Path:
        lock.write_text(lock.read_text() + "# once more\n")
        return venvs.install(Recipe(NAME, lock), tmp_path / "runtimes", lambda _line: None).path

    return install


def argv_0(daemon: Daemon) -> str:
    pid = daemon.model("chat")["replicas"][0]["pid"]
    return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])


def llmux(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisor.cli", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )


def test_a_daemon_goes_on(tmp_path, change):
    runtimes = tmp_path / "runtimes"
    first = change()
    config = {"server": {"runtimes_dir": str(runtimes)}, "models": {"chat": gguf()}}
    with running(tmp_path, config) as daemon:
        daemon.chat("chat").raise_for_status()
        assert argv_0(daemon) == str(first / "bin" / "python")
        second = change()
        assert daemon.chat("chat").json()["choices"][0]["message"]["content"].endswith(tiny.ANSWER)
        assert argv_0(daemon) == str(first / "bin" / "python")

        told = llmux("runtimes", "list", "--runtimes-dir", str(runtimes)).stdout
        assert "workers of chat still run from an earlier environment" in told
        assert "llmux unload chat" in told

        daemon.post("/v1/admin/models/chat/unload").raise_for_status()
        wait_until(lambda: not first.exists(), what="the last worker takes it away")
        daemon.chat("chat").raise_for_status()
        assert argv_0(daemon) == str(second / "bin" / "python")

        third = change()
        for pid in (daemon.process.pid, *daemon.workers()):
            with contextlib.suppress(ProcessLookupError):  # gone with the daemon, before its turn came
                os.kill(pid, signal.SIGKILL)
        daemon.process.wait()
        assert second.exists()
        daemon.start()
        wait_until(lambda: not second.exists(), what="the next daemon takes it away")
        daemon.chat("chat").raise_for_status()
        assert argv_0(daemon) == str(third / "bin" / "python")


def test_install_and_remove_tell_of_workers(tmp_path, change):
    runtimes = tmp_path / "runtimes"
    change()
    config = {"server": {"runtimes_dir": str(runtimes)}, "models": {"chat": gguf()}}
    with running(tmp_path, config) as daemon:
        daemon.chat("chat").raise_for_status()
        installed = llmux("runtimes", "install", NAME, "--runtimes-dir", str(runtimes))
        assert "installed in" in installed.stdout
        assert "workers of chat still run" in installed.stderr
        removed = llmux("runtimes", "remove", NAME, "--runtimes-dir", str(runtimes))
        assert "removed" in removed.stdout
        assert "workers of chat still run" in removed.stderr
        daemon.chat("chat").raise_for_status()
    again = llmux("runtimes", "remove", NAME, "--runtimes-dir", str(runtimes))
    assert (again.stdout, again.stderr) == (f"{NAME}: was not installed\n", "")
