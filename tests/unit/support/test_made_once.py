"""What tests share is made once, whole, by whoever comes first; and anew when what it is made of has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervisor.host.environments.venvs import Environment
from tests.support import made_once
from tests.support.daemon import REPOSITORY, wait_until

WRITES = """
import sys
from pathlib import Path
from tests.support import made_once

folder, gate = Path(sys.argv[1]), sys.argv[2]
made_once.FOLDER = folder / "made"


def write(path):
    path.mkdir()
    (path / "half").touch()
    with (folder / "written").open("a") as log:
        log.write("once\\n")
    open(gate).read()  # until somebody lets it go on
    (path / "whole").touch()


print(made_once.made("thing", write, None, by=()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(made_once, "FOLDER", tmp_path / "made")
    return tmp_path


def begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITES, str(folder), str(folder / "gate")]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def has_asked(pid: int) -> bool:
    return any(file.path.endswith(".lock") for file in psutil.Process(pid).open_files())


def written(folder: Path) -> int:
    log = folder / "written"
    return len(log.read_text().splitlines()) if log.exists() else 0


class TestSideBySide:
    """Processes that want the same thing in an empty cache get one, which one of them makes."""

    def test_together(self, folder):
        os.mkfifo(folder / "gate")
        running = [begin(folder) for _ in range(4)]
        wait_until(lambda: all(has_asked(process.pid) for process in running))
        (folder / "gate").open("w").close()
        places = {Path(process.communicate()[0].strip()) for process in running}
        (place,) = places
        assert {path.name for path in place.iterdir()} == {"half", "whole"}
        assert written(folder) == 1

    def test_whoever_makes_it_is_killed(self, folder):
        os.mkfifo(folder / "gate")
        with begin(folder) as first:
            wait_until(lambda: written(folder) == 1)
            first.kill()
        with begin(folder) as second:
            (folder / "gate").open("w").close()
            place = Path(second.stdout.read().strip())
        assert {path.name for path in place.iterdir()} == {"half", "whole"}
        assert written(folder) == 2


class TestNames:
    """A name is another one when anything is that the thing depends on."""

    @pytest.fixture
    def sources(self, folder, monkeypatch) -> Path:
        monkeypatch.setattr(made_once, "REPOSITORY", folder)
        files = {
            "maker/main.py": "from maker import near\nimport far.away\n",
            "maker/near.py": "",
            "maker/words.txt": "a",
            "far/away.py": "def f():\n    from far.inner import thing\n",
            "far/inner/__init__.py": "thing = 1",
            "far/stranger.py": "",
            "requirements-dev.lock": "numpy==1",
        }
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    def name(self, sources: Path, of: object = 1) -> str:
        for known in (made_once._digest, made_once._packages):
            known.cache_clear()
        return made_once.made("thing.txt", Path.touch, sources / "maker" / "main.py", of).name

    @pytest.mark.parametrize(
        "changed",
        [
            "maker/main.py",
            "maker/near.py",
            "maker/words.txt",
            "far/away.py",
            "far/inner/__init__.py",
            "requirements-dev.lock",
        ],
    )
    def test_a_source(self, sources, changed):
        before = self.name(sources)
        with (sources / changed).open("a") as file:
            file.write("\n# changed")
        assert self.name(sources) != before

    def test_the_parameters(self, sources):
        assert self.name(sources, 1) != self.name(sources, 2)

    def test_the_environment_of_a_runtime(self, folder, monkeypatch):
        names = set()
        for digest in ("a", "b"):
            made_once._packages.cache_clear()
            found = Environment("r", folder, "3.11.7", None, "cpu", digest, ())
            monkeypatch.setattr(made_once.environments, "installed", lambda _name: folder)
            monkeypatch.setattr(made_once.venvs, "installed", lambda _name, _folder, found=found: found)
            names.add(made_once.made("thing", Path.touch, None, by=("r",)).name)
        assert len(names) == 2

    def test_nothing_else(self, sources):
        before = self.name(sources)
        (sources / "far/stranger.py").write_text("changed = True")
        (sources / "maker/__pycache__").mkdir()
        assert self.name(sources) == before
        assert before.startswith("thing-")
        assert before.endswith(".txt")

    @pytest.fixture(autouse=True)
    def forgotten(self):
        yield
        for known in (made_once._digest, made_once._packages):
            known.cache_clear()
