"""`make release`, and its install script on a machine without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import release


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A release, with what llmux needs carried beside it."""
    folder = release.release(tmp_path_factory.mktemp("dist"))
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    words = ["--only-binary", ":all:", "--requirement", "requirements.lock", "--dest", "wheels"]
    subprocess.run([*download, *words], cwd=folder, check=True)
    return folder


class Person:
    """Somebody with an empty home, and no network: pip is told of an index that nobody serves."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.command = home / ".local" / "bin" / "llmux"
        self.env = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": sys.executable}
        self.env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}

    def __call__(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=self.env, cwd=self.home, capture_output=True, text=True, check=False)

    def versions(self) -> list[Path]:
        return sorted((self.home / ".local/share/llmux/program").iterdir())


class TestFiles:
    """Everything that a person publishes, and nothing else."""

    def test_all_are_summed(self, made):
        summed = {line.split()[1] for line in (made / release.SUMS).read_text().splitlines()}
        assert summed == {path.name for path in made.iterdir()} - {"wheels", release.SUMS}

    def test_notes_are_those_of_one_version(self):
        changelog = "# Changelog\n\n## 1.1\n\nNew.\n\n## 1.0\n\nOld.\n"
        assert release.notes(changelog, "1.1") == "## 1.1\n\nNew.\n"
        with pytest.raises(LookupError, match=r"no heading '## 2\.0'"):
            release.notes(changelog, "2.0")


def test_install_again_and_remove(made, tmp_path):
    person = Person(tmp_path)
    told = person("sh", made / "install.sh")
    assert told.returncode == 0, told.stderr
    assert f"Add {tmp_path}/.local/bin to your PATH." in told.stdout
    assert person(person.command, "--version").stdout == f"llmux, version {made.name.removeprefix('llmux-')}\n"
    first = person.versions()
    assert person("sh", made / "install.sh").returncode == 0
    assert len(person.versions()) == 2, "the one before stays"
    assert person("sh", made / "install.sh").returncode == 0
    assert len(person.versions()) == 2
    assert not set(first) & set(person.versions())
    assert person(person.command, "--version").returncode == 0
    assert person("sh", made / "install.sh", "--remove").returncode == 0
    assert not os.path.lexists(person.command)
    assert not (tmp_path / ".local/share/llmux/program").exists()


def test_what_is_not_the_release_is_refused(made, tmp_path):
    other = shutil.copytree(made, tmp_path / "other", ignore=shutil.ignore_patterns("wheels"))
    with (other / "requirements.lock").open("a") as lock:
        lock.write("evil==1.0\n")
    person = Person(tmp_path)
    told = person("sh", other / "install.sh")
    assert told.returncode == 1
    assert "not those of the release" in told.stderr
    assert not person.command.exists()


def test_nothing_of_another_is_replaced(made, tmp_path):
    person = Person(tmp_path)
    person.command.parent.mkdir(parents=True)
    person.command.write_text("#!/bin/sh\n")
    told = person("sh", made / "install.sh")
    assert told.returncode == 1
    assert "move it away" in told.stderr
    assert person.command.read_text() == "#!/bin/sh\n"
