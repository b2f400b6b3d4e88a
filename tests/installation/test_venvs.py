"""Runtime environments: whole or not at all, from a lock and nothing else. Packages here are built on the spot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uv

from supervisor.host.environments import venvs
from supervisor.host.environments.installer import InstallError
from supervisor.host.environments.recipe import Recipe
from supervisor.host.store import files
from tests.support.daemon import wait_until
from tests.support.wheels import wheel


def quiet(_line):
    pass


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Write a lock for a version of the package `worker`; uv sees only a local folder, which pip's settings name."""
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)

    def write(version="1.0", digest=None, name="demo"):
        actual = wheel(tmp_path / "wheels", "worker", version)
        path = tmp_path / "requirements.lock"
        path.write_text(f"worker=={version} \\\n    --hash=sha256:{digest or actual}\n")
        return Recipe(name, path)

    return write


def version_in(environment) -> str:
    code = "import sys, worker; print(worker.version, sys.prefix)"
    run = subprocess.run([environment.interpreter, "-I", "-c", code], capture_output=True, text=True, check=True)
    version, prefix = run.stdout.split()
    assert Path(prefix) == environment.path
    return version


class TestInstall:
    """A runtime's environment is what its lock says."""

    def test_installs_and_records(self, lock, tmp_path):
        lines: list[str] = []
        environment = venvs.install(lock(), tmp_path / "runtimes", lines.append)
        assert version_in(environment) == "1.0"
        assert "worker==1.0" in environment.packages
        assert environment == venvs.installed("demo", tmp_path / "runtimes")
        assert (tmp_path / "runtimes/demo/bin/python").exists()
        assert list(environment.path.rglob("worker*.pyc"))
        assert environment.size_bytes() > 0
        assert any("worker" in line for line in lines)

    def test_a_second_time_does_nothing(self, lock, tmp_path):
        first = venvs.install(lock(), tmp_path / "runtimes", quiet)
        lines: list[str] = []
        assert venvs.install(lock(), tmp_path / "runtimes", lines.append) == first
        assert len(lines) == 1
        assert "already installed" in lines[0]

    def test_another_lock_replaces_it(self, lock, tmp_path):
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        new = venvs.install(lock("2.0"), tmp_path / "runtimes", quiet)
        assert version_in(new) == "2.0"
        assert not old.path.exists()

    def test_runtimes_dont_touch_each_other(self, lock, tmp_path):
        first = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        venvs.install(lock("2.0", name="demo-b"), tmp_path / "runtimes", quiet)
        venvs.remove("demo-b", tmp_path / "runtimes")
        assert version_in(first) == "1.0"

    def test_two_at_once_take_turns(self, lock, tmp_path):
        recipe, lines = lock(), []
        threads = [
            threading.Thread(target=venvs.install, args=(recipe, tmp_path / "runtimes", lines.append)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum("already installed" in line for line in lines) == 1

    def test_remove(self, lock, tmp_path):
        assert not venvs.remove("demo", tmp_path / "runtimes")
        venvs.install(lock(), tmp_path / "runtimes", quiet)
        assert venvs.remove("demo", tmp_path / "runtimes")
        assert venvs.installed("demo", tmp_path / "runtimes") is None
        assert [path.name for path in (tmp_path / "runtimes/.envs/demo").iterdir()] == ["lock"]

    def test_remove_waits_for_an_installation_and_says_so(self, lock, tmp_path):
        """One that compiles takes up to an hour."""
        venvs.install(lock(), tmp_path / "runtimes", quiet)
        lines: list[str] = []
        removing = threading.Thread(target=venvs.remove, args=("demo", tmp_path / "runtimes", lines.append))
        with files.locked(tmp_path / "runtimes/.envs/demo/lock", lambda: None):
            removing.start()
            wait_until(lambda: lines == ["waiting for another installation to finish"])
        removing.join()
        assert venvs.installed("demo", tmp_path / "runtimes") is None


class TestUv:
    """The one that is installed with llmux does it, wherever that is."""

    def test_no_other_is_asked(self, lock, tmp_path, monkeypatch):
        other = tmp_path / "bin/uv"
        other.parent.mkdir()
        other.write_text("#!/bin/sh\nexit 7\n")
        other.chmod(0o755)
        monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
        assert version_in(venvs.install(lock(), tmp_path / "runtimes", quiet)) == "1.0"

    def test_it_is_gone(self, lock, tmp_path, monkeypatch):
        def gone() -> str:
            raise uv._find_uv.UvNotFound

        monkeypatch.setattr(uv, "find_uv_bin", gone)
        with pytest.raises(InstallError, match="install llmux again"):
            venvs.install(lock(), tmp_path / "runtimes", quiet)
        assert venvs.installed("demo", tmp_path / "runtimes") is None


class TestFailure:
    """Whatever goes wrong, the environment from before still works and nothing is left behind."""

    def test_a_package_that_isnt_what_the_lock_says(self, lock, tmp_path):
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        with pytest.raises(InstallError, match="exit code") as error:
            venvs.install(lock("2.0", digest="0" * 64), tmp_path / "runtimes", quiet)
        assert any("hash" in line.lower() for line in error.value.detail)
        assert version_in(old) == "1.0"
        assert sorted(path.name for path in old.path.parent.iterdir()) == sorted(["lock", old.path.name])

    def test_a_folder_that_isnt_ours_is_left_alone(self, lock, tmp_path):
        mine = tmp_path / "runtimes/demo/mine"
        mine.parent.mkdir(parents=True)
        mine.write_text("x")
        with pytest.raises(InstallError, match="did not make"):
            venvs.install(lock(), tmp_path / "runtimes", quiet)
        assert mine.read_text() == "x"

    def test_killed_at_any_moment(self, lock, tmp_path):
        old = venvs.install(lock("1.0"), tmp_path / "runtimes", quiet)
        recipe = lock("2.0")
        code = "from pathlib import Path; from supervisor.host.environments import recipe, venvs\n"
        code += f"wanted = recipe.Recipe('demo', Path({str(recipe.lock)!r}))\n"
        code += "import signal, sys\ndef tell(line):\n"
        code += "    if 'lingers' in sys.argv and not line.startswith('creating'):\n        signal.pause()\n"
        code += f"venvs.install(wanted, Path({str(tmp_path / 'runtimes')!r}), tell)"
        killed = 0
        for i in range(6):
            process = subprocess.Popen(
                [sys.executable, "-c", code, "lingers" if i == 0 else "hurries"],  # the first is never too quick for us
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd=Path.cwd(),
            )
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and len(list(old.path.parent.iterdir())) < 3 and process.poll() is None:
                time.sleep(0.001)
            time.sleep(0.02 * i)
            os.killpg(process.pid, signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
            live = venvs.installed("demo", tmp_path / "runtimes")
            assert version_in(live) in ("1.0", "2.0")
            if version_in(live) == "2.0":
                break
        assert killed
        new = venvs.install(recipe, tmp_path / "runtimes", quiet)
        assert version_in(new) == "2.0"
        assert sorted(entry.name for entry in new.path.parent.iterdir()) == sorted(["lock", new.path.name])
