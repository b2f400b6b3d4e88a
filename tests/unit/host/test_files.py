"""Files that are replaced as a whole."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from supervisor.host.store.files import create, refusal, replacing


class TestReplacing:
    """A file has its old or its new content, and no temporary file is left."""

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
                raise OSError(errno.ENOSPC, "full")

        with pytest.raises(OSError, match=f"full: '{path}'"):
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


class TestCreate:
    """A new file is whole, or not there."""

    def test_for_its_owner(self, tmp_path):
        create(tmp_path / "new" / "keys", "a")
        assert (tmp_path / "new" / "keys").stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError):
            create(tmp_path / "new" / "keys", "b")

    def test_not_half(self, tmp_path):
        with pytest.raises(UnicodeEncodeError):
            create(tmp_path / "keys", "a\udc80")
        assert list(tmp_path.iterdir()) == []


class TestRefusal:
    """Whether files can be made in a folder that may not be there yet."""

    def test_refusal(self, tmp_path):
        (tmp_path / "file").touch()
        assert refusal(tmp_path / "a" / "b") is None
        told = refusal(tmp_path / "file" / "a")
        assert told is not None
        assert (told.errno, told.filename) == (errno.ENOTDIR, str(tmp_path / "file"))
