"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import subprocess

import pytest

from supervisor.io.files import replacing


class TestReplacing:
    """A file is there as it was or as it should be, and nothing is left beside it."""

    def test_in_one_step(self, tmp_path):
        path = tmp_path / "keys"
        path.write_text("old")
        with replacing(path) as fresh:
            fresh.write_text("new")
            assert path.read_text() == "old"
        assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("keys", "new")]

    def test_not_where_the_block_raises(self, tmp_path):
        path = tmp_path / "keys"
        path.write_text("old")

        def fail() -> None:
            with replacing(path) as fresh:
                fresh.write_text("ne")
                raise OSError("full")

        with pytest.raises(OSError, match="full"):
            fail()
        assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("keys", "old")]

    def test_what_killed_writers_left_goes(self, tmp_path):
        with subprocess.Popen(["true"]) as ended:
            pass
        kept = {f".keys.{os.getppid()}.new", f".other.{ended.pid}.new", ".keys.mine.new", "keys"}
        for name in kept | {f".keys.{ended.pid}.new", f".keys.{os.getpid()}.new"}:
            (tmp_path / name).touch()
        with replacing(tmp_path / "keys"):
            pass
        assert {entry.name for entry in tmp_path.iterdir()} == kept
