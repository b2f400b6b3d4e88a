"""Who comes for a daemon's place and then hangs, or says what nobody understands, costs a few seconds and nothing else."""

from __future__ import annotations

import array
import collections
import contextlib
import datetime as dt
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.daemon.handover.handover import SOCKET
from tests.faults.test_takeover import Upgraded, worker
from tests.support.clients import Stream, code
from tests.support.counts import times
from tests.support.daemon import fake, wait_until

REASONS = {
    "start": "it did not come within",
    "met": "it did not say who it is within",
    "half": "it did not get ready within",
    "prepared": "it did not get ready within",
    "serving": "it did not begin to serve within",
}
SAYS = """
import json, os, socket, sys
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.chdir(os.path.dirname(sys.argv[1]))
channel.connect(os.path.basename(sys.argv[1]))
for text in sys.argv[2:]:
    channel.send(text.encode())
print("said", flush=True)
while channel.recv(1 << 20):
    pass
print("refused", flush=True)
"""


class Hanging(Upgraded):
    program = ("-m", "tests.support.faulty_daemon", "hanging")


@pytest.fixture
def daemon(tmp_path) -> Iterator[Upgraded]:
    daemon = Upgraded(tmp_path, {"models": {"a": fake(), "b": fake()}}).start()
    yield daemon
    daemon.end()


@pytest.fixture
def impatient(tmp_path) -> Iterator[Upgraded]:
    """It waits 2 s for each step."""
    env = {"HANGS_AT": "met", "HURRIES": "1"}
    daemon = Hanging(tmp_path, {"models": {"a": fake(), "b": fake()}}, env).start()
    yield daemon
    daemon.end()


def hung(folder: Path, step: str, **env: str) -> tuple[str, float]:
    """What an upgrade says whose successor hangs, and how long nothing new was loaded at most. Nothing has changed then."""
    daemon = Hanging(folder, {"models": {"a": fake(), "b": fake()}}, env={"HANGS_AT": step, **env}).start()
    try:
        assert daemon.chat("a").status_code == 200
        before = worker(daemon, "a")
        may_end = folder / "may-end"
        stream = Stream(daemon, "a", fake={"goes_on_until": str(may_end)})
        wait_until(lambda: stream.chunks)
        answer = daemon.post("/v1/admin/upgrade")
        assert (answer.status_code, code(answer)) == (503, "upgrade_failed"), answer.text
        (began,) = daemon.events("upgrade.began") or [None]
        assert daemon.chat("b").status_code == 200  # and plans again
        loaded = daemon.events("request.finished")[-1]
        may_end.touch()
        assert stream.result().ended_cleanly, stream.error
        assert not daemon.successors()
        assert worker(daemon, "a") == before
        job = daemon.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": {"model": "b", "messages": []}})
        wait_until(lambda: daemon.get(f"/v1/jobs/{job.json()['id']}").json()["status"] == "completed")
        told: str = answer.json()["error"]["message"]
        (failed,) = daemon.events("upgrade.failed") or [None]
        assert failed is None or failed["reason"] in told
        assert (failed is None) == (step == "start"), "else the log says it, too"
        assert "Traceback" not in daemon.log_text()
        assert not daemon.events("store.unusable")
        held_s = 0.0 if began is None else (_time(loaded) - _time(began)).total_seconds()
    finally:
        daemon.end()
    return told, held_s


def _time(event: dict[str, str]) -> dt.datetime:
    return dt.datetime.fromisoformat(event["timestamp"])


class TestThatHangs:
    """Everything comes back to the old daemon, which says why: its state, too, in the schema that it knows."""

    @pytest.mark.parametrize("step", REASONS)
    def test_at_a_step(self, tmp_path, step):
        told, _ = hung(tmp_path, step, HURRIES="1")
        assert f"this one goes on: {REASONS[step]}" in told

    def test_holds_nothing_for_long(self, tmp_path, measured):
        told, held_s = hung(tmp_path, "prepared")
        measured(held_s=held_s)
        assert "it did not get ready within 8 s" in told
        assert held_s < 60  # two minutes, once


class TestThatSpeaks:
    """One who connects and says too little, or the wrong thing, is refused and changes nothing."""

    def said(self, daemon: Upgraded, *messages: str) -> str:
        """Another process says this. Why it was refused, or ended."""
        before = len(daemon.events("upgrade.failed"))
        command = [sys.executable, "-I", "-S", "-c", SAYS, str(daemon.state_dir / SOCKET), *messages]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "said\n"
            failed = wait_until(lambda: daemon.events("upgrade.failed")[before:])
            other.stdout.read()  # until it has learned, or was ended
        assert len(failed) == 1
        assert daemon.chat("b").status_code == 200
        assert daemon.post("/v1/admin/models/b/unload").status_code == 200
        assert "Traceback" not in daemon.log_text()
        return str(failed[0]["reason"])

    def hello(self, daemon: Upgraded) -> str:
        return json.dumps({"version": 1, "address": ["127.0.0.1", daemon.port]})

    def test_never(self, impatient):
        assert "did not say who it is within 2 s" in self.said(impatient)

    def test_half(self, impatient):
        assert "did not get ready within 2 s" in self.said(impatient, self.hello(impatient))

    def test_something_else(self, daemon):
        hello, prepared = self.hello(daemon), json.dumps({"prepared": True})
        assert "it has had enough" in self.said(daemon, hello, '{"failed": "it has had enough"}')
        assert "not a JSON object" in self.said(daemon, hello, "prepared")
        assert "did not say that it is prepared" in self.said(daemon, hello, '{"serving": true}')
        assert "did not say that it is serving" in self.said(daemon, hello, prepared, prepared)
        assert "not a JSON object" in self.said(daemon, hello, prepared, "[]")
        daemon.upgrade()


GARBAGE = {
    "nothing": b"",
    "a byte": b"\x00",
    "half": b'{"version":',
    "no text": b"\xff\xfe",
    "deep": b"[" * 200_000,
    "null": b"null",
    "a list": b"[1]",
    "no version": b"{}",
    "another version": b'{"version": 2}',
    "a long version": b'{"version": "' + b"x" * 900_000 + b'"}',
    "no address": b'{"version": 1}',
    "a number as address": b'{"version": 1, "address": 7}',
    "a nested address": b'{"version": 1, "address": [[{}], null, 1e999]}',
    "a long message": b'{"version": 1, "address": "' + b"x" * 1_100_000 + b'"}',
}


class TestGarbage:
    """Whatever comes over the socket is one line of the log."""

    def sent(self, daemon: Upgraded, data: bytes, *descriptors: int) -> dict[str, str]:
        before = len(daemon.events("upgrade.failed"))
        folder = os.open(daemon.state_dir, os.O_PATH)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            channel.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            os.close(folder)
            channel.sendmsg([data], passed)
            wait_until(lambda: daemon.events("upgrade.failed")[before:])
        failed = daemon.events("upgrade.failed")[before:]
        assert len(failed) == 1
        return failed[0]

    def test_is_told_in_words(self, daemon):
        found = []
        for _ in range(2):
            for what, data in GARBAGE.items():
                told = self.sent(daemon, data)
                assert (told["level"], len(told["reason"]) < 400) == ("error", True), what
                assert told["successor"] == os.getpid()
            for number in (1, 2, 40):
                assert "descriptors" in self.sent(daemon, b'{"version": 1}', *[0] * number)["reason"]
            found.append(descriptors(daemon.serving))
        wait_until(lambda: not descriptors(daemon.serving) - found[0], what=f"nothing stays open: {found}")
        assert "Traceback" not in daemon.log_text()
        assert not daemon.events("upgrade.began")
        daemon.upgrade()


def descriptors(pid: int) -> collections.Counter[str]:
    """What a process has open, by kind."""
    found = collections.Counter[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found[re.sub(r"[0-9]+", "N", str(entry.readlink()))] += 1
    return found


def test_many_upgrades_leave_nothing_behind(daemon):
    """The last daemon has the descriptors that the first successors had, and no child of it would inherit one."""
    assert daemon.chat("a").status_code == 200
    pid, first = 0, collections.Counter[str]()
    for number in range(times(5, 10)):
        pid = daemon.upgrade()
        wait_until(lambda pid=pid: daemon.successors() == [pid], what="only the last one is left")
        assert daemon.chat("a").status_code == 200
        if number < 3:
            first |= descriptors(pid)  # one may not have begun to read memory
    wait_until(lambda: not descriptors(pid) - first, what=f"no more than at first: {first}")
    flags = dict(_flags(pid))
    assert {number for number, value in flags.items() if not value & os.O_CLOEXEC} == {0, 1, 2}
    assert not daemon.events("upgrade.failed")


def _flags(pid: int) -> Iterator[tuple[int, int]]:
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield int(entry.name), int(entry.read_text().split("flags:")[1].split()[0], 8)
