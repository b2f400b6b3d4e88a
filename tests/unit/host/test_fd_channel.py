"""Listening on a unix socket, and whether that lasts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.host.process.fd_channel import goes_on_listening
from tests.support.limits import LIMIT_S

LISTENS = """
import os, signal, socket, sys
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(sys.argv[1])
listening.listen(8)
print("listens", flush=True)
listening.accept()
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "inherited":
    if os.fork() != 0:
        os._exit(0)
signal.pause()
"""


@pytest.fixture
def listens(tmp_path):
    """Another process that listens; `what` is its reaction to a connection."""
    processes = []

    def start(what: str) -> Path:
        path = tmp_path / "a.sock"
        command = [sys.executable, "-c", LISTENS, str(path), what]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert processes[-1].stdout.readline() == "listens\n"
        return path

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class TestGoesOnListening:
    """A daemon that is being killed doesn't count as running."""

    def test_one_that_lives(self, listens):
        assert goes_on_listening(listens("lives"), within_s=0.0)

    def test_one_that_is_killed_meanwhile(self, listens):
        assert not goes_on_listening(listens("killed"), within_s=LIMIT_S)

    def test_one_whose_child_has_its_socket(self, listens):
        assert goes_on_listening(listens("inherited"), within_s=LIMIT_S)

    def test_nobody(self, tmp_path):
        assert not goes_on_listening(tmp_path / "b.sock", within_s=LIMIT_S)
