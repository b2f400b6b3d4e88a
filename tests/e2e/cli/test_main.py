"""What all commands have in common: help, keys, and no daemon where they look."""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections.abc import Iterator

import click
import pytest

from supervisor.cli.exit_codes import MEANINGS, ExitCode
from supervisor.cli.main import INSTEAD
from supervisor.cli.main import main as llmux
from tests.support.daemon import REPOSITORY, Daemon, fake
from tests.support.shell import LLMUX


class TestNoDaemon:
    """Every command that asks one says so, and what to do."""

    @pytest.mark.parametrize(
        "words",
        ["ps", "top --once", "load x", "unload x", "logs x", "logs x -f", "events", "why", "chat x Hello"],
    )
    def test_unreachable(self, alone, words):
        told = alone(*words.split())
        assert (told.returncode, told.stdout) == (ExitCode.UNREACHABLE, "")
        assert "llmux serve" in told.stderr

    def test_no_url(self, alone):
        assert alone("ps", "--url", "nowhere").returncode == ExitCode.FAILED
        assert alone("ps", "--url", "http://[half").returncode == ExitCode.FAILED

    def test_a_proxy_is_not_asked(self, shell):
        assert shell("ps", http_proxy="http://127.0.0.1:1").returncode == ExitCode.DONE


class TestKeys:
    """A daemon with keys refuses, with a code of its own."""

    def test_refused(self, tmp_path, shell):
        daemon = Daemon(tmp_path, {"models": {"plain": fake()}})
        daemon.config_path.write_text("models: {}")
        made = shell("keys", "add", "user", "--scope", "inference", "--config", str(daemon.config_path), "--json")
        user = json.loads(made.stdout)["key"]
        admin = shell("keys", "add", "ops", "--scope", "admin", "--config", str(daemon.config_path)).stdout.strip()
        try:
            daemon.start()
            for variables in ({}, {"LLMUX_API_KEY": "sk-unknown-to-everybody"}, {"LLMUX_API_KEY": user}):
                told = shell("ps", "--url", daemon.url, **variables)
                assert (told.returncode, told.stdout) == (ExitCode.REFUSED, "")
                assert "--scope admin" in told.stderr
            assert shell("ps", "--url", daemon.url, LLMUX_API_KEY=admin).returncode == ExitCode.DONE
            assert shell("ps", "--url", daemon.url, "--key", admin).returncode == ExitCode.DONE
        finally:
            daemon.stop()


class TestHelp:
    """What is told of the commands, and what it costs."""

    def test_exit_codes(self, alone):
        shown = alone("--help").stdout
        assert set(MEANINGS) == set(ExitCode)
        for code in ExitCode:
            assert f"\n  {int(code)} " in shown

    def test_is_quick(self, alone):
        """As processor time, not counting what a loaded machine adds to it by waiting."""
        for words in (("--help",), ("ps",)):
            used = []
            for _ in range(3):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                alone(*words)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            assert min(used) < 0.25, words

    def test_every_command_takes_json(self):
        def commands(group: click.Group) -> Iterator[click.Command]:
            for command in group.commands.values():
                yield from commands(command) if isinstance(command, click.Group) else (command,)

        without = [
            command.name
            for command in commands(llmux)
            if "--json" not in [option for parameter in command.params for option in parameter.opts]
        ]
        assert without == []

    def test_the_demo_has_its_own_configuration(self, alone):
        told = alone("serve", "--demo", "--config", "my.yaml")
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert "leave out" in told.stderr

    def test_serve_tells_programs_where_it_listens(self, alone):
        """One line on stdout: all that is needed with a port that the system chooses."""
        (alone.home / "my.yaml").write_text("models: {a: {cmd: [cat, '${port}'], vram_mib: 1}}\n")
        command = [*LLMUX, "serve", "--config", "my.yaml", "--port", "0", "--state-dir", "state", "--json"]
        with subprocess.Popen(
            command, env=alone.env(PYTHONPATH=str(REPOSITORY)), cwd=alone.home, stdout=subprocess.PIPE, text=True
        ) as daemon:
            try:
                told = json.loads(daemon.stdout.readline())
                rows = json.loads(alone("ps", "--json", "--url", told["url"]).stdout)["data"]
            finally:
                daemon.terminate()
            rest = daemon.stdout.read()
        assert (told["pid"], told["models"], told["keys"]) == (daemon.pid, ["a"], 0)
        assert [row["name"] for row in rows] == ["a"]
        assert (rest, daemon.returncode) == ("", 0)

    @pytest.mark.parametrize(
        ("words", "means"),
        [
            ("list", "ps"),
            ("ls", "ps"),
            ("status", "ps"),
            ("rm x", "remove x"),
            ("stop x", "unload x"),
            ("get x", "add x"),
        ],
    )
    def test_words_of_other_programs(self, alone, words, means):
        told, meant = alone(*words.split()), alone(*means.split())
        assert (told.returncode, told.stdout, told.stderr) == (meant.returncode, meant.stdout, meant.stderr)
        assert words.split()[0] not in llmux.list_commands(click.Context(llmux))

    @pytest.mark.parametrize("word", sorted(INSTEAD))
    def test_words_that_have_no_command(self, alone, word):
        """They say which command does it, and that command is there."""
        told = alone(word, "x")
        assert told.returncode == ExitCode.USAGE
        named = re.findall(r"llmux (?!has)([a-z]+)", told.stderr)
        assert word == "help" or set(named) <= set(llmux.commands)
        assert INSTEAD[word] in told.stderr

    def test_wrong_usage(self, alone):
        assert alone("pss").returncode == ExitCode.USAGE
        assert alone("load").returncode == ExitCode.USAGE
        assert alone("why", "-n", "0").returncode == ExitCode.USAGE
