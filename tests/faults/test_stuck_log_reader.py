"""Whoever reads the log stops reading: a pager, a stopped journal. Nothing waits for it, and what is lost is counted."""

from __future__ import annotations

import json
import os
import re
import threading
import time

import pytest

from tests.support.daemon import Daemon, fake, wait_until
from tests.support.limits import LIMIT_S

LONG = "x" * 200
DROPPED = re.compile(r"^llmux_log_lines_dropped_total (\S+)$", re.MULTILINE)


class Pipe:
    """A pipe that is full, and that nobody reads before `drain`."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        own = os.open(f"/proc/self/fd/{self.writer}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            while os.write(own, b"\n" * 4096):
                pass
        except BlockingIOError:
            pass
        os.close(own)
        self._read = bytearray()
        self._drain = threading.Thread(target=self._read_all)

    def drain(self) -> None:
        """Read it, until its last writer has ended."""
        self._drain.start()

    def _read_all(self) -> None:
        while part := os.read(self.reader, 1 << 16):
            self._read += part

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in bytes(self._read).rpartition(b"\n")[0].splitlines() if line[:1] == b"{"]

    def all_lines(self) -> list[dict[str, object]]:
        """What there was, once the last writer has ended."""
        self._drain.join(LIMIT_S)
        return self.lines()


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    if not pipe._drain.ident:
        pipe.drain()
    pipe._drain.join(LIMIT_S)
    os.close(pipe.reader)


def start(folder, pipe: Pipe) -> Daemon:
    """A daemon whose stdout and stderr are this pipe."""
    daemon = Daemon(folder, {"models": {"plain": fake()}})
    daemon.start(wait=False, stdout=pipe.writer, stderr=pipe.writer)
    os.close(pipe.writer)
    wait_until(daemon._answers)
    return daemon


def dropped(daemon: Daemon) -> int:
    return int(float(DROPPED.search(daemon.get("/metrics").text)[1]))


def ask_until_lines_are_lost(daemon: Daemon) -> None:
    with daemon.client() as client:
        deadline = time.monotonic() + LIMIT_S
        while not dropped(daemon):
            assert time.monotonic() < deadline
            for _ in range(50):
                body = {"model": LONG, "messages": [{"role": "user", "content": "Hello"}]}
                assert client.post("/v1/chat/completions", json=body).status_code == 404


def test_it_serves_and_ends(tmp_path, pipe, measured):
    """Requests are answered, and SIGTERM ends it although nobody ever reads."""
    daemon = start(tmp_path, pipe)
    try:
        assert daemon.chat("plain").status_code == 200
        ask_until_lines_are_lost(daemon)
        assert daemon.chat("plain").status_code == 200
        asked_at = time.monotonic()
        assert daemon.stop() == 0
        measured(ended_s=time.monotonic() - asked_at)
    finally:
        daemon.kill()


def test_what_is_lost_is_said(tmp_path, pipe, measured):
    """When somebody reads again, a line says how many are missing, where they are missing; the last lines are there."""
    daemon = start(tmp_path, pipe)
    try:
        ask_until_lines_are_lost(daemon)
        pipe.drain()
        said = wait_until(lambda: [line for line in pipe.lines() if line["event"] == "log.dropped"])
        wait_until(
            lambda: sum(line["lines"] for line in pipe.lines() if line["event"] == "log.dropped") == dropped(daemon)
        )
        assert daemon.chat("plain").status_code == 200
        assert daemon.stop() == 0
        lines = pipe.all_lines()
        assert lines[0]["event"] != "log.dropped", "the oldest were already on their way"
        assert lines[-1]["event"] == "daemon.stopped"
        measured(lost=said[0]["lines"], read=len(lines))
    finally:
        daemon.kill()
