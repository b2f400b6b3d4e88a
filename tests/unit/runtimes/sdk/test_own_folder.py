"""A worker's own temporary folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtimes.sdk.own_folder import own_folder

HOLDER = (
    "from runtimes.sdk.own_folder import own_folder; f = own_folder('llmux-x-'); print(f.name, flush=True); input()"
)


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
        with own_folder("llmux-x-") as other:
            assert left.is_dir()  # it is in use
        holder.kill()
    assert (left / "picture.png").exists()
    with own_folder("llmux-x-") as own:
        assert not left.exists()
        assert sorted(temporary.iterdir()) == [Path(own)] != [Path(other)]


def test_what_is_not_its_own_stays(temporary):
    others = [temporary / "llmux-y-1", temporary / "llmux-x-file", temporary / "llmux-x-link"]
    others[0].mkdir()
    others[1].touch()
    others[2].symlink_to(others[0])
    with own_folder("llmux-x-"):
        pass
    assert sorted(temporary.iterdir()) == sorted(others)
