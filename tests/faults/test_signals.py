"""Signals at any moment of a daemon's life, and a start without stdin, stdout and stderr."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.counts import times
from tests.support.daemon import Daemon, fake, wait_until

MODELS = {"models": {"plain": fake()}}


def catches(number: int, pid: int) -> bool:
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_storm_of_signals(tmp_path, measured):
    """SIGTERM without a pause until the process is gone: it stopped cleanly, and says so."""
    sent = 0
    for _ in range(times(2, 50)):
        daemon = Daemon(tmp_path, MODELS)
        daemon.by_exec = True  # to the very end, when Python takes it apart
        daemon.start()
        daemon.chat("plain").raise_for_status()
        while daemon.process.poll() is None:
            daemon.signal(signal.SIGTERM if sent % 50 else signal.SIGHUP)
            sent += 1
            time.sleep(0.0003)
        assert daemon.process.returncode == 0
        assert "Traceback" not in daemon.log_text()
        assert "ignored" not in daemon.log_text()
        assert daemon.workers() == []
    measured(signals=sent)


@pytest.mark.parametrize("moment", ["program", "lock"])
def test_a_signal_while_it_starts(tmp_path, moment):
    """SIGTERM before it serves is a clean end, too."""
    daemon = Daemon(tmp_path, MODELS)
    daemon.by_exec = True  # else it starts too soon
    daemon.start(wait=False)
    pid = daemon.process.pid
    try:
        lock = daemon.state_dir / "instance.lock"
        wait_until(lock.exists if moment == "lock" else lambda: catches(signal.SIGTERM, pid))
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log_text()
    finally:
        daemon.kill()


def test_a_reload_that_is_asked_for_while_it_starts(tmp_path):
    """SIGHUP doesn't end it, and is obeyed when there is something to reload."""
    daemon = Daemon(tmp_path, MODELS)
    daemon.by_exec = True  # else it starts too soon
    daemon.start(wait=False)
    try:
        while not catches(signal.SIGHUP, daemon.process.pid):  # without a pause: it must not be ready yet
            assert daemon.process.poll() is None, daemon.log_text()
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: list(daemon.events("reload.finished")))
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def test_a_start_without_stdin_stdout_and_stderr(tmp_path):
    """What is opened later doesn't get their numbers: a line that is printed can't land in a socket or a database."""
    close = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, sys.orig_argv[:1] + sys.argv[1:])"
    daemon = Daemon(tmp_path, MODELS)
    daemon.program = ("-c", close, *daemon.program)
    try:
        daemon.start()
        daemon.chat("plain").raise_for_status()
        opened = [os.readlink(f"/proc/{daemon.process.pid}/fd/{number}") for number in range(3)]
        assert opened == ["/dev/null"] * 3
        assert daemon.stop() == 0
    finally:
        daemon.kill()
