"""A process with limits opens clients' files, and never outlives the daemon."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from PIL import Image

from supervisor.errors import InvalidRequestError
from supervisor.host.media import convert
from supervisor.host.media.convert import Converter
from tests.support.trees import wait_until

ROOT = Path(__file__).parents[3]


def picture(size=(8, 8), form="WEBP", mode="RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, 128).save(out, form)
    return out.getvalue()


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Replace the converter's program."""

    def put(code: str) -> Path:
        path = tmp_path / "child.py"
        path.write_text(textwrap.dedent(code))
        monkeypatch.setattr(convert, "_CHILD", path)
        return path

    return put


class TestPictures:
    """Pictures become PNG."""

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
    async def test_any_mode(self, mode):
        found = await Converter().convert("picture", picture(form="GIF" if mode == "P" else "WEBP", mode=mode))
        assert Image.open(io.BytesIO(found)).size == (8, 8)

    async def test_as_it_stands(self):
        """A camera stores the orientation beside the picture."""
        out = io.BytesIO()
        turned = Image.Exif()
        turned[0x0112] = 6
        Image.new("RGB", (8, 4)).save(out, "WEBP", exif=turned)
        found = await Converter().convert("picture", out.getvalue())
        assert Image.open(io.BytesIO(found)).size == (4, 8)

    async def test_one_that_is_too_large(self):
        with pytest.raises(InvalidRequestError, match=r"Could not process image: .*pixels"):
            await Converter().convert("picture", picture((8000, 6000), "PNG", "1"))


class TestProcess:
    """It converts only new files, and is killed at its limit."""

    async def test_what_was_opened_is_kept(self, child):
        converter = Converter()
        data = picture()
        first = await converter.convert("picture", data)
        child("raise SystemExit(1)")
        assert await converter.convert("picture", data) == first
        with pytest.raises(InvalidRequestError, match="too long, or too much memory"):
            await converter.convert("picture", picture((4, 4)))
        child("print(1)")
        assert await converter.convert("picture", picture((4, 4))) == b"1\n", "another time it may not be so"

    async def test_a_refusal_is_kept(self, child):
        converter = Converter()
        child("import sys; sys.stderr.write('it is odd'); raise SystemExit(3)")
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="it is odd"):
                await converter.convert("pdf", b"x")
            child("print(1)")

    async def test_no_more_is_kept_than_may_be(self, monkeypatch):
        monkeypatch.setattr(convert, "KEPT_BYTES", 300)
        converter = Converter()
        for size in range(1, 9):
            await converter.convert("picture", picture((size, size)))
        assert sum(map(len, converter._results.values())) == converter._results_bytes <= 300

    async def test_it_hangs(self, child, monkeypatch):
        child("import time; time.sleep(600)")
        monkeypatch.setattr(convert, "LIMIT_S", 0.5)
        with pytest.raises(InvalidRequestError, match="it takes more than"):
            await Converter().convert("pdf", b"%PDF")

    async def test_what_opens_them_is_missing(self, child):
        child("raise SystemExit(4)")
        with pytest.raises(InvalidRequestError, match="pip install 'llmux-supervisor"):
            await Converter().convert("pdf", b"%PDF")

    async def test_its_request_is_cancelled(self, child, tmp_path):
        note = tmp_path / "pid"
        child(f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
        task = asyncio.create_task(Converter().convert("pdf", b"%PDF"))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)


def test_it_ends_with_the_daemon(tmp_path):
    """By the kernel, while it waits for its input."""
    code = """
        import asyncio, sys
        from supervisor.host.media import convert
        async def main():
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(convert._CHILD), "pdf", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
            process.stdin.write(b'%PDF')
            await process.stdin.drain()
            await asyncio.sleep(1)
            print(process.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    held = os.pipe()  # the child's input stays open
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT, pass_fds=held, text=True
    )
    child = int(daemon.stdout.readline())
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon.stdout.close()
    wait_until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])
    for each in held:
        os.close(each)
