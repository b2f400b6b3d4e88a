"""The folder of a ComfyUI worker: its own while it lives, and nobody's after that."""

from __future__ import annotations

import os
import tempfile

import pytest

from runtimes.comfyui.worker.folder import KINDS, PREFIX, Folder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(folder: Folder) -> None:
    """As the kernel does at an exit: it closes the process's files."""
    os.close(folder._lock)


def test_it_is_there_and_goes():
    folder = Folder()
    assert {path.name for path in folder.path.iterdir()} == {*KINDS}
    (folder.path / "input" / "portrait").touch()
    folder.clear()
    assert not [path for path in folder.path.rglob("*") if path.is_file()]
    folder.close()
    assert not folder.path.exists()


def test_the_next_one_deletes_what_was_left_and_nothing_else(place):
    left, living = Folder(), Folder()
    killed(left)
    others = place / "llmux-others"
    others.mkdir()
    (place / f"{PREFIX}link").symlink_to(others)
    Folder()
    assert not left.path.exists()
    assert living.path.exists()
    assert others.exists()
