"""The commands that go on: what they print of what happens."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from supervisor.cli.commands.watch import KINDS
from supervisor.cli.exit_codes import ExitCode
from supervisor.engine import events
from tests.support.daemon import REPOSITORY, wait_until
from tests.support.shell import LLMUX

ESCAPE = "\x1b"


class TestWatching:
    """`why`, `logs`, `events`, `top`."""

    def test_why(self, shell):
        shell("load", "chat")
        shell("unload", "chat")
        one = shell("why", "chat").stdout
        assert "unloaded by an operator" in one
        assert "MODEL" in shell("why", "-n", "5").stdout.splitlines()[0]
        assert len(json.loads(shell("why", "chat", "-n", "2", "--json").stdout)["data"]) == 2

    def test_why_a_request_waited(self, site, shell, gate):
        shell("unload", "slow")
        body = {"model": "slow", "messages": []}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.post, "/v1/chat/completions", json=body, headers={"x-request-id": "a-client"})
            waiting = "It waits for the model to load. "
            told = wait_until(lambda: (s := shell("why", "--request", "a-client").stdout) and waiting in s and s)
            assert "it has been queued for" in told
            gate.touch()
            asked.result().raise_for_status()
        wait_until(lambda: "it ended with 200" in shell("why", "--request", "a-client").stdout, what="its end")
        told = shell("why", "--request", "a-client").stdout
        assert "It waited for the model to load." in told
        assert re.search(r"slow +ready +loaded in", told), told
        found = json.loads(shell("why", "--request", "a-client", "--json").stdout)
        waited_s = sum(part["s"] for part in found["wait"] if part["kind"] != "body")
        assert waited_s * 1000 == pytest.approx(found["queue_ms"], abs=20)
        by_number = shell("why", "--request", found["id"])
        assert by_number.stdout == told

    def test_why_of_a_request_that_nobody_knows(self, shell):
        unknown = shell("why", "--request", "nobody's")
        assert unknown.returncode == ExitCode.NOT_FOUND
        assert "the last 1000" in unknown.stderr
        assert shell("why", "chat", "--request", "1").returncode == ExitCode.USAGE

    def test_logs(self, shell):
        shell("load", "chat")
        assert len(shell("logs", "chat", "-n", "3").stdout.splitlines()) == 3
        assert len(json.loads(shell("logs", "chat", "-n", "3", "--json").stdout)["lines"]) == 3

    def test_logs_are_followed(self, site, shell, tmp_path):
        shell("load", "chat")
        out = tmp_path / "out"
        with out.open("wb") as file:
            command = [*LLMUX, "logs", "chat", "-f", "-n", "1", "--json"]
            follower = subprocess.Popen(command, env=shell.env(), cwd=REPOSITORY, stdout=file)
        try:
            before = len(wait_until(lambda: out.read_text(), what="the last line"))
            site.chat("quick").raise_for_status()
            wait_until(lambda: len(out.read_text()) > before, what="a new line")
            assert all("line" in json.loads(line) for line in out.read_text().splitlines())
        finally:
            follower.kill()
            follower.wait()

    @pytest.mark.parametrize("as_json", [False, True])
    def test_events(self, shell, tmp_path, as_json):
        out = tmp_path / "out"
        with out.open("wb") as file:
            command = [*LLMUX, "events", "--types", "decision,model", *(["--json"] if as_json else [])]
            listener = subprocess.Popen(command, env=shell.env(), cwd=REPOSITORY, stdout=file)
        try:

            def heard() -> str:
                shell("load", "talker")  # until it listens
                shell("unload", "talker")
                return out.read_text()

            wanted = {"unloaded by an operator"} | ({'"event": "decision"', '"event": "model"'} if as_json else set())
            wait_until(lambda: (told := heard()) and all(text in told for text in wanted), what="the events")
            last = '"state": "stopped"' if as_json else "talker: stopped"
            wait_until(lambda: last in out.read_text(), what="what came of it")
        finally:
            listener.kill()
            listener.wait()
        if as_json:
            assert {json.loads(line)["event"] for line in out.read_text().splitlines()} == {"decision", "model"}

    def test_kinds_are_the_daemons(self, shell):
        assert events.KINDS == KINDS
        wrong = shell("events", "--types", "model,nothing")
        assert wrong.returncode == ExitCode.USAGE
        assert "'nothing'" in wrong.stderr

    def test_top_once(self, shell):
        shown = shell("top", "--once").stdout
        assert "4 models loaded" in shown
        assert "host" in shown
        assert re.search(r"^host  [━╸╺ ]{24}  \d.* used, ", shown, re.MULTILINE)
        assert ESCAPE not in shown
        seen = json.loads(shell("top", "--json").stdout)
        assert {"devices", "leases", "models", "requests"} == set(seen)
