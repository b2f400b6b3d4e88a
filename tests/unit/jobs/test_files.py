"""Files of batches: written piece by piece, found once they are whole, and still there after a restart."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from supervisor.errors import NotFoundError, UnavailableError
from supervisor.host.store.store import MIGRATIONS, NotSavedError, Store
from supervisor.jobs import files as module
from supervisor.jobs.files import File, Files


@asynccontextmanager
async def opened(folder: Path, growing: Iterable[File] = ()) -> AsyncIterator[Files]:
    store = await Store.open(folder / "state.sqlite3")
    files = Files()
    files.open(store, folder, growing)
    try:
        yield files
    finally:
        await store.close()


async def kept(files: Files, owner: str | None = None) -> File:
    file = files.begin(owner, "batch")
    await files.append(file, [b"one\n", b"two\n"])
    await files.keep(file)
    return file


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "files").iterdir()}


async def test_of_a_store_that_cannot_be_read_all_stay(tmp_path):
    """Such as one on a full disk, which has no room for its new schema: with room they are there again."""
    async with opened(tmp_path) as files:
        file = await kept(files)
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite3")) as state:
        state.execute("PRAGMA user_version = 99")
    async with opened(tmp_path):
        assert names(tmp_path) == {file.id}
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite3")) as state:
        state.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    async with opened(tmp_path) as files:
        assert [each.id for each in files.listing(None, is_admin=True)] == [file.id]


class TestKept:
    async def test_over_a_restart(self, tmp_path):
        async with opened(tmp_path) as files:
            file = await kept(files, "ann")
        async with opened(tmp_path) as files:
            assert files.find(file.id, "ann", is_admin=False) == file
            with await files.open_file(file.id) as content:
                assert content.read() == b"one\ntwo\n"
            assert files.disk_bytes == 8

    async def test_only_for_its_owner(self, tmp_path):
        async with opened(tmp_path) as files:
            file = await kept(files, "ann")
            assert files.find(file.id, "bob", is_admin=True) is file
            with pytest.raises(NotFoundError):
                files.find(file.id, "bob", is_admin=False)

    async def test_nobody_finds_what_is_not_whole(self, tmp_path):
        async with opened(tmp_path) as files:
            file = files.begin(None, "batch")
            await files.append(file, [b"x"])
            with pytest.raises(NotFoundError):
                files.find(file.id, None, is_admin=True)
            assert files.disk_bytes == 1
        async with opened(tmp_path) as files:
            assert (files.disk_bytes, names(tmp_path)) == (0, set())

    async def test_what_grows_goes_on(self, tmp_path):
        async with opened(tmp_path) as files:
            file = files.begin(None, "batch_output")
            await files.append(file, [b"one\n"])
        again = File(file.id, None, "", "batch_output", 0.0)
        async with opened(tmp_path, [again]) as files:
            assert again.bytes == 4
            await files.append(again, [b"two\n"])
            await files.keep(again)
            with await files.open_file(again.id) as content:
                assert content.read() == b"one\ntwo\n"

    async def test_what_is_removed_is_gone(self, tmp_path):
        async with opened(tmp_path) as files:
            file = await kept(files)
            await files.remove([file.id])
            assert (files.disk_bytes, names(tmp_path), files.listing(None, is_admin=True)) == (0, set(), [])

    async def test_so_many(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "MOST", 1)
        async with opened(tmp_path) as files:
            await kept(files)
            with pytest.raises(UnavailableError):
                files.begin(None, "batch")


class TestAppending:
    """All of it, or nothing."""

    async def test_half_of_it_is_nothing(self, tmp_path, monkeypatch):
        async with opened(tmp_path) as files:
            file = files.begin(None, "batch")
            await files.append(file, [b"one\n"])

            def refuse(_descriptor: int) -> None:
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", refuse)
                with pytest.raises(NotSavedError, match="No space left"):
                    await files.append(file, [b"a longer line that is lost\n"])
            assert file.bytes == 4
            await files.append(file, [b"two\n"])
            with await files.open_file(file.id) as content:
                assert content.read() == b"one\ntwo\n"

    async def test_a_folder_that_cannot_be_used(self, tmp_path):
        (tmp_path / "files").write_text("")
        with capture_logs() as logged:
            async with opened(tmp_path) as files:
                with pytest.raises(UnavailableError):
                    files.begin(None, "batch")
        (line,) = [line for line in logged if line["event"] == "files.unusable"]
        assert line["consequence"] == "no batches are taken"
