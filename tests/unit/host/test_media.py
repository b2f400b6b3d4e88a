"""Files for prompts: regular files below one folder, after all links."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from supervisor.host.media.media import PIECE, MediaSource, _body_pieces
from tests.support.limits import LIMIT_S


@pytest.fixture
def folder(tmp_path):
    below = tmp_path / "media"
    (below / "in").mkdir(parents=True)
    (below / "in" / "a").write_bytes(b"content")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-2").mkdir()
    (tmp_path / "media-2" / "a").write_bytes(b"secret")
    return below


async def read(folder, path):
    return b"".join([piece async for piece in await MediaSource().file(folder, path)])


def opened():
    """The files that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(link.readlink())
    return found


class TestFiles:
    """The checked file is the file that is read."""

    async def test_below(self, folder):
        assert await read(folder, folder / "in" / "a") == b"content"
        assert await read(folder, folder / "in" / ".." / "in" / "a") == b"content"

    async def test_links_within(self, folder):
        (folder / "link").symlink_to("in/a")
        (folder.parent / "to-media").symlink_to(folder)
        assert await read(folder, folder / "link") == b"content"
        assert await read(folder, folder.parent / "to-media" / "link") == b"content"
        assert await read(folder.parent / "to-media", folder / "link") == b"content"

    async def test_in_pieces(self, folder):
        content = os.urandom(2 * PIECE + 1)
        (folder / "in" / "a").write_bytes(content)
        assert await read(folder, folder / "in" / "a") == content

    async def test_no_more_than_it_had_when_it_was_opened(self, folder):
        file = await MediaSource().file(folder, folder / "in" / "a")
        with (folder / "in" / "a").open("ab") as more:
            more.write(b" and more")
        assert (file.size, [piece async for piece in file]) == (7, [b"content"])

    async def test_its_descriptor_goes_with_it(self, folder):
        path = folder / "in" / "a"
        file = await MediaSource().file(folder, path)
        assert path in opened()
        del file
        async with asyncio.timeout(LIMIT_S):
            while path in opened():  # until its thread has let go of it
                await asyncio.sleep(0.01)

    @pytest.mark.parametrize("name", ["../secret", "../media-2/a", "in/../../secret", "..", ".", "", "../missing"])
    async def test_outside(self, folder, name):
        with pytest.raises(PermissionError):
            await read(folder, folder / name)

    @pytest.mark.parametrize(
        "to", ["../secret", "/etc/passwd", "/dev/zero", "/proc/self/environ", "/nowhere", "..", "/"]
    )
    async def test_links_to_the_outside(self, folder, to):
        (folder / "link").symlink_to(to)
        with pytest.raises(PermissionError):
            await read(folder, folder / "link")
        (folder / "far").symlink_to("link")
        with pytest.raises(PermissionError):
            await read(folder, folder / "far")

    async def test_a_link_that_changes_after_the_first_look(self, folder, monkeypatch):
        target = folder / "in" / "b"
        target.write_bytes(b"b")
        real = os.path.realpath

        def realpath(path):
            found = real(path)
            if str(path) == str(target):
                target.unlink()
                target.symlink_to(folder.parent / "secret")
            return found

        monkeypatch.setattr(os.path, "realpath", realpath)
        with pytest.raises(PermissionError):
            await read(folder, target)

    async def test_what_is_no_file(self, folder):
        os.mkfifo(folder / "fifo")
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(folder / "s"))
            for name in ("fifo", "s", "in"):
                with pytest.raises(PermissionError):
                    await read(folder, folder / name)

    async def test_what_is_not_there(self, folder):
        with pytest.raises(FileNotFoundError):
            await read(folder, folder / "missing")

    async def test_a_loop_of_links(self, folder):
        (folder / "loop").symlink_to("loop")
        with pytest.raises(OSError):
            await read(folder, folder / "loop")


class TestPieces:
    """A server that sends single bytes may have queued thousands of pieces."""

    async def test_others_have_their_turns(self):
        turns = 0

        async def stream():
            for _ in range(1000):
                yield b"x"

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        assert b"".join([piece async for piece in _body_pieces(stream())]) == b"x" * 1000
        beside.cancel()
        assert turns > 20
