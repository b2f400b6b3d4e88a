"""Who listens on a unix socket, and whether that lasts."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from supervisor.io.fd_channel import goes_on_listening


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "a.sock"))
        listening.listen(8)
        yield listening


class TestGoesOnListening:
    """A daemon that is being killed is none that runs."""

    def test_one_that_lives(self, listener):
        def accept() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=accept, daemon=True).start()
        assert goes_on_listening(Path(listener.getsockname()), within_s=0.0)

    def test_one_that_ends_meanwhile(self, listener):
        def end() -> None:
            listener.accept()[0].close()
            listener.close()

        name = Path(listener.getsockname())
        threading.Thread(target=end).start()
        assert not goes_on_listening(name, within_s=60.0)

    def test_nobody(self, tmp_path):
        assert not goes_on_listening(tmp_path / "b.sock", within_s=60.0)
