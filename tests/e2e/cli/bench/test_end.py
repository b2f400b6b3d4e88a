"""The temporary worker ends with the command, however that ends, and what it died of is told."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support.daemon import fake, wait_until
from tests.support.limits import LIMIT_S

STAGES = {"while it loads": ("--warmup", "3600"), "while it is asked": ("--hang",)}


class TestSignals:
    """Ctrl-C, the end of the session, kill -9: real signals to the real command."""

    @pytest.mark.parametrize("flags", STAGES.values(), ids=STAGES)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
    def test_nothing_is_left(self, bench, number, flags):
        # Children and a grandchild that left the process group, the session and heeds no SIGTERM.
        bench.write({"chat": fake(*flags, "--fork", "--daemonize", env={"BENCH_TEST": str(bench.folder)})})
        command = bench.start("chat", "--prompt", "Hello")
        try:
            wait_until(lambda: "loading chat" in bench.told.read_text(), what="it loads")
            tree = wait_until(
                lambda: len(found := processes(command.pid, bench.folder)) >= 4 and found, what="the tree"
            )
            if "--hang" in flags:
                wait_until(lambda: "warming up" in bench.told.read_text(), what="it is asked")
            command.send_signal(number)
            code = command.wait(LIMIT_S)
        finally:
            command.kill()
            command.wait()
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else ExitCode.INTERRUPTED), bench.told.read_text()
        wait_until(lambda: not any(alive(pid, started) for pid, started in tree), what=f"the end of {tree}")
        wait_until(lambda: not processes(command.pid, bench.folder), what="the end of all of it")
        if number is not signal.SIGKILL:
            assert bench.leftovers() == []
            assert "Traceback" not in bench.told.read_text()

    def test_ctrl_c_twice(self, bench):
        bench.write({"chat": fake("--hang", "--ignore-term", grace_s=3600, env={"BENCH_TEST": str(bench.folder)})})
        command = bench.start("chat")
        try:
            wait_until(lambda: "warming up" in bench.told.read_text(), what="it is asked")
            tree = processes(command.pid, bench.folder)
            assert tree
            command.send_signal(signal.SIGINT)
            with contextlib.suppress(ProcessLookupError):
                command.send_signal(signal.SIGINT)
            assert command.wait(LIMIT_S) == ExitCode.INTERRUPTED
        finally:
            command.kill()
            command.wait()
        wait_until(lambda: not any(alive(pid, started) for pid, started in tree), what=f"the end of {tree}")


class TestTrouble:
    """A worker that doesn't do its work."""

    def test_one_that_doesnt_start_tells_why(self, bench):
        bench.write({"chat": fake("--exit-code", "1", "--log-text", "no such file: weights.bin")})
        (row,) = bench.json("chat", code=ExitCode.FAILED)["devices"]
        assert "no such file: weights.bin" in row["detail"]
        assert row["rate"] is None
        assert "no such file: weights.bin" in bench("chat").stdout
        assert bench.leftovers() == []

    def test_one_that_dies_in_an_answer(self, bench):
        bench.write({"chat": fake("--die-after", "2")})
        (row,) = bench.json("chat", code=ExitCode.FAILED)["devices"]
        assert "SIGKILL" in row["problem"]

    def test_one_that_refuses(self, bench):
        bench.write({"chat": fake("--status", "400")})
        (row,) = bench.json("chat", code=ExitCode.FAILED)["devices"]
        assert row["problem"] == "/v1/chat/completions answers with 400: as told"

    def test_one_that_says_nothing(self, bench):
        bench.write({"chat": fake("--chunks", "0")})
        (row,) = bench.json("chat", code=ExitCode.FAILED)["devices"]
        assert "--prompt" in row["problem"]

    def test_nothing_but_the_answer_is_on_stdout(self, bench):
        bench.write({"chat": fake()})
        found = bench.json("chat", "--rounds", "1")  # which parses it
        assert found["devices"][0]["rounds"][0]["amount"] == 5
        assert bench.leftovers() == []


def processes(command: int, folder: Path) -> set[tuple[int, str]]:
    """(pid, start time) of the command's children, and of all that carry the test's mark, zombies left out."""
    mark = f"BENCH_TEST={folder}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                ours = int(fields[1]) == command or mark in (entry / "environ").read_bytes().split(b"\0")
                if ours and fields[0] != "Z":
                    found.add((int(entry.name), fields[19]))
    return found


def alive(pid: int, started: str) -> bool:
    """Is it still this very process?"""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"
