"""`llmux chat` in pipes."""

from __future__ import annotations

import json
import subprocess
import sys

from supervisor.cli.exit_codes import ExitCode
from tests.support import tiny
from tests.support.daemon import REPOSITORY, fake, running, wait_until
from tests.support.limits import LIMIT_S


class TestChat:
    """`chat` with a prompt: one answer."""

    def test_a_prompt_in_words(self, shell):
        assert shell("chat", "quick", "Hello", "there").stdout == f"{tiny.ANSWER}\n"

    def test_a_prompt_on_stdin(self, shell):
        assert shell("chat", "quick", stdin="Hello there").stdout == f"{tiny.ANSWER}\n"
        assert shell("chat", "quick", stdin="").returncode == ExitCode.USAGE

    def test_thoughts_are_not_in_the_answer(self, shell):
        told = shell("chat", "thinker", "Hello")
        assert told.stdout == f"{tiny.ANSWER}\n"
        assert told.stderr == f"{tiny.THOUGHT}\n"
        assert shell("chat", "thinker", "Hello", "--no-thinking").stderr == ""

    def test_json(self, shell):
        answer = json.loads(shell("chat", "quick", "Hello", "--json").stdout)
        assert answer["choices"][0]["message"]["content"] == tiny.ANSWER
        assert shell("chat", "quick", "--json", stdin="Hello").returncode == ExitCode.DONE

    def test_is_heard_to_the_end(self, tmp_path):
        """Of the stream, which comes after its last event: the log doesn't say that we left."""
        with running(tmp_path, {"models": {"slow": fake("--end-delay", "0.3")}}) as daemon:
            command = [sys.executable, "-m", "supervisor.cli", "chat", "slow", "Hello", "--url", daemon.url]
            told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=REPOSITORY)
            assert told.returncode == 0, told.stderr
            (line,) = wait_until(lambda: daemon.events("request.finished"))
        assert (line["status"], line["error"]) == (200, None)

    def test_an_error_in_the_stream(self, site, shell):
        told = shell("chat", "broken", "Hello")
        assert (told.returncode, told.stdout) == (ExitCode.FAILED, "")
        assert "llmux logs broken" in told.stderr
