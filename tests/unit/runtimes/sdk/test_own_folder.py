"""A worker's own temporary folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from runtimes.sdk.own_folder import OwnFolder

HOLDER = """
from runtimes.sdk.own_folder import OwnFolder
own = OwnFolder("llmux-x-")
print(own.path, flush=True)
input()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def held():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def test_what_a_killed_worker_leaves_goes_with_the_next(temporary):
    holder, left = held()
    with holder:
        (left / "picture.png").touch()
        with closing(OwnFolder("llmux-x-")) as other:
            assert left.is_dir()  # it is in use
        holder.kill()
    assert (left / "picture.png").exists()
    with closing(OwnFolder("llmux-x-")) as own:
        assert list(temporary.iterdir()) == [own.path] != [other.path]
    assert not list(temporary.iterdir())


def test_what_is_not_its_own_stays(temporary):
    others = [temporary / "llmux-x-file", temporary / "llmux-x-link", temporary / "llmux-y-1"]
    others[0].touch()
    others[1].symlink_to(others[2])
    others[2].mkdir()
    OwnFolder("llmux-x-").close()
    assert sorted(temporary.iterdir()) == others
