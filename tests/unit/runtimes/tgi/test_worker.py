"""TGI's launcher is started with a folder for its sockets, which no other user can enter."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtimes.adapters.worker_adapter import BOOTSTRAP

LAUNCHER = f"""#!{sys.executable} -IS
import json, os, socket, sys
sockets = sys.argv[sys.argv.index("--shard-uds-path") + 1]
socket.socket(socket.AF_UNIX).bind(sockets + "-0")
mode = os.stat(os.path.dirname(sockets)).st_mode & 0o777
print(json.dumps({{"words": sys.argv[1:], "sockets": sockets, "mode": mode, "pid": os.getpid()}}), flush=True)
input()
"""


@pytest.fixture
def temporary():
    """Not pytest's: a socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="llmux-t-") as folder:
        yield Path(folder)


@contextmanager
def launched(folder: Path, temporary: Path):
    """The report of a running launcher. At the end the launcher is killed."""
    program = folder / "text-generation-launcher"
    program.write_text(LAUNCHER)
    program.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-IS", str(BOOTSTRAP), "runtimes.tgi.worker", str(program), "--port", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"TMPDIR": str(temporary)},
    )
    with process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_the_launcher_takes_the_place_of_what_started_it(tmp_path, temporary):
    with launched(tmp_path, temporary) as (process, said):
        assert said["pid"] == process.pid
        assert said["words"] == ["--port", "1", "--shard-uds-path", said["sockets"]]


def test_nobody_else_can_take_a_sockets_name(tmp_path, temporary):
    with launched(tmp_path, temporary) as (_, said):
        assert said["mode"] == 0o700
        assert Path(said["sockets"]).parent.parent == temporary


def test_what_a_launcher_leaves_goes_with_the_next(tmp_path, temporary):
    with launched(tmp_path, temporary) as (_, first):
        with launched(tmp_path, temporary) as (_, second):
            assert Path(f"{first['sockets']}-0").is_socket()  # it is in use
        assert Path(f"{second['sockets']}-0").is_socket()
    with launched(tmp_path, temporary) as (_, third):
        assert [*temporary.glob("llmux-tgi-*")] == [Path(third["sockets"]).parent]


def test_a_folder_whose_sockets_would_have_too_long_names(tmp_path):
    (deep := tmp_path / ("d" * 100)).mkdir()
    process = subprocess.run(
        [sys.executable, "-IS", str(BOOTSTRAP), "runtimes.tgi.worker", "/bin/true"],
        env={"TMPDIR": str(deep)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.endswith("set TMPDIR to a shorter one\n")
    assert not [*deep.iterdir()]
