"""The commands that ask a daemon: what they print for people and machines, and how they end."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator

import click
import pytest

from supervisor.cli import environments
from supervisor.cli.commands.watch import KINDS
from supervisor.cli.exit_codes import MEANINGS, ExitCode
from supervisor.cli.main import main as llmux
from supervisor.daemon import events
from tests import tiny
from tests.cli.conftest import LLMUX
from tests.daemon import REPOSITORY, Daemon, fake, wait_until

ESCAPE = "\x1b"


class TestModels:
    """`ps`, `load`, `unload`."""

    def test_a_model_comes_and_goes(self, site, shell):
        loaded = shell("load", "chat")
        assert (loaded.returncode, loaded.stderr) == (ExitCode.DONE, "")
        head, row = loaded.stdout.splitlines()
        assert head.split()[:3] == ["MODEL", "STATE", "DEVICE"]
        assert row.split()[:3] == ["chat", "ready", "host"]
        assert "MiB / " in row
        (listed,) = [line for line in shell("ps").stdout.splitlines() if line.startswith("chat ")]
        assert "loaded in" in listed
        assert shell("unload", "chat").returncode == ExitCode.DONE
        assert site.model("chat")["state"] == "stopped"

    def test_json(self, shell):
        ps = json.loads(shell("ps", "--json").stdout)
        assert [model["name"] for model in ps["data"]] == ["chat", "slow", "talker", "broken"]
        assert json.loads(shell("load", "chat", "--json").stdout)["state"] == "ready"
        assert json.loads(shell("unload", "chat", "--force", "--json").stdout)["state"] == "stopped"

    def test_wide_has_more_columns(self, shell):
        head = shell("ps", "--wide").stdout.splitlines()[0].split()
        assert {"RUNTIME", "PRIORITY", "PORT"} <= set(head)

    def test_a_setting_for_one_load(self, site, shell):
        assert shell("load", "chat", "--set", "n_ctx=1024").returncode == ExitCode.DONE
        assert site.model("chat")["overrides"] == {"n_ctx": 1024}
        refused = shell("load", "chat", "--set", "path=/etc/passwd")
        assert (refused.returncode, refused.stdout) == (ExitCode.FAILED, "")
        assert "path" in refused.stderr
        assert shell("load", "chat", "--set", "n_ctx").returncode == ExitCode.USAGE
        shell("unload", "chat")

    def test_a_failed_load_tells_where_to_look(self, shell):
        failed = shell("load", "broken")
        assert (failed.returncode, failed.stdout) == (ExitCode.FAILED, "")
        assert "no such file: weights.bin" in failed.stderr
        assert "llmux logs broken" in failed.stderr
        assert "no such file" in shell("logs", "broken").stdout

    @pytest.mark.parametrize("words", [("load",), ("unload",), ("logs",), ("why",), ("chat", "--json")])
    def test_an_unknown_model(self, shell, words):
        told = shell(words[0], "nope", *words[1:], stdin="Hello")
        assert (told.returncode, told.stdout) == (ExitCode.NOT_FOUND, "")
        assert "nope" in told.stderr
        assert "llmux ps" in told.stderr


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
        made = shell("keys", "add", "user", "--config", str(daemon.config_path), "--json")
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


class TestWatching:
    """`why`, `logs`, `events`, `top`."""

    def test_why(self, shell):
        shell("load", "chat")
        shell("unload", "chat")
        one = shell("why", "chat").stdout
        assert "unloaded by an operator" in one
        assert "MODEL" in shell("why", "-n", "5").stdout.splitlines()[0]
        assert len(json.loads(shell("why", "chat", "-n", "2", "--json").stdout)["data"]) == 2

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

            wait_until(lambda: "unloaded by an operator" in heard(), what="the event")
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
        assert {"devices", "models", "requests"} == set(seen)


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

    def test_an_error_in_the_stream(self, site, shell):
        told = shell("chat", "broken", "Hello")
        assert (told.returncode, told.stdout) == (ExitCode.FAILED, "")
        assert "weights.bin" in told.stderr


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
        (alone.home / "my.yaml").write_text("models: {a: {cmd: [cat], vram_mib: 1}}\n")
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

    def test_wrong_usage(self, alone):
        assert alone("pss").returncode == ExitCode.USAGE
        assert alone("load").returncode == ExitCode.USAGE
        assert alone("why", "-n", "0").returncode == ExitCode.USAGE


class TestCompletion:
    """Scripts for three shells, and names that come from the daemon."""

    @pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
    def test_script(self, alone, shell_name):
        script = alone("completion", shell_name)
        assert script.returncode == ExitCode.DONE
        assert "_LLMUX_COMPLETE" in script.stdout
        as_json = json.loads(alone("completion", shell_name, "--json").stdout)
        assert (as_json["shell"], as_json["script"]) == (shell_name, script.stdout.rstrip("\n") + "\n")

    def completed(self, shell, *words: str) -> set[str]:
        told = shell(
            _LLMUX_COMPLETE="bash_complete", COMP_WORDS=" ".join(["llmux", *words]), COMP_CWORD=str(len(words))
        )
        return {line.partition(",")[2] for line in told.stdout.splitlines() if line}

    def test_names(self, shell, monkeypatch):
        monkeypatch.setattr("tests.cli.conftest.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(shell, "load", "") == {"chat", "slow", "talker", "broken"}
        assert self.completed(shell, "load", "SL") == {"slow"}
        assert {"quick", "thinker"} <= self.completed(shell, "chat", "")
        assert "unload" in self.completed(shell, "un")

    def test_names_of_keys(self, alone, monkeypatch):
        monkeypatch.setattr("tests.cli.conftest.LLMUX", [LLMUX[0], "-c", PROGRAM])
        for name in ("webui", "ops"):
            assert alone("keys", "add", name).returncode == ExitCode.DONE
        assert self.completed(alone, "keys", "revoke", "w") == {"webui"}

    def test_names_of_runtimes(self, alone, monkeypatch):
        monkeypatch.setattr("tests.cli.conftest.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(alone, "runtimes", "install", "") == set(environments.installable())
        assert self.completed(alone, "runtimes", "install", "fa") == {"faster_whisper"}
        folder = str(tiny.runtimes_dir())
        assert "llama_server" in self.completed(alone, "runtimes", "remove", "--runtimes-dir", folder, "")
        assert self.completed(alone, "runtimes", "remove", "--runtimes-dir", str(alone.home), "") == set()

    def test_kinds_of_events(self, alone, monkeypatch):
        monkeypatch.setattr("tests.cli.conftest.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(alone, "events", "--types", "") == set(KINDS)
        assert self.completed(alone, "events", "--types", "m") == {"model", "memory"}
        assert self.completed(alone, "events", "--types", "model,m") == {"model,memory"}
        assert self.completed(alone, "events", "--types", "alert,model,re") == {
            "alert,model,request",
            "alert,model,reload",
        }

    @pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
    def test_in_bash_itself(self, alone):
        """The script that is printed, in the shell it is for: what stands there after TAB."""
        folder = alone.home / "bin"
        folder.mkdir()
        program = folder / "llmux"
        program.write_text(f"#!{LLMUX[0]}\n{PROGRAM}\n")
        program.chmod(0o755)
        asked = (
            'eval "$(llmux completion bash)"; COMP_WORDS=(llmux events --types "model,m"); COMP_CWORD=3; '
            '_llmux_completion llmux; echo "${COMPREPLY[@]}"'
        )
        env = alone.env(PYTHONPATH=str(REPOSITORY)) | {"PATH": f"{folder}:{os.environ['PATH']}"}
        told = subprocess.run(["bash", "-c", asked], env=env, capture_output=True, text=True, check=True)
        assert told.stdout == "model,memory\n"

    def test_no_daemon_completes_nothing(self, alone, monkeypatch):
        monkeypatch.setattr("tests.cli.conftest.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(alone, "load", "") == set()


PROGRAM = "from supervisor.cli.main import main; main(prog_name='llmux')"
