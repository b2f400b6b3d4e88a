"""What a shell completes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from supervisor.cli import environments
from supervisor.cli.commands.watch import KINDS
from supervisor.cli.exit_codes import ExitCode
from tests.support import tiny
from tests.support.daemon import REPOSITORY
from tests.support.shell import LLMUX


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
        monkeypatch.setattr("tests.support.shell.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(shell, "load", "") == {"chat", "slow", "talker", "broken"}
        assert self.completed(shell, "load", "SL") == {"slow"}
        assert {"quick", "thinker"} <= self.completed(shell, "chat", "")
        assert "unload" in self.completed(shell, "un")

    def test_names_of_keys(self, alone, monkeypatch):
        monkeypatch.setattr("tests.support.shell.LLMUX", [LLMUX[0], "-c", PROGRAM])
        for name in ("webui", "ops"):
            assert alone("keys", "add", name).returncode == ExitCode.DONE
        assert self.completed(alone, "keys", "revoke", "w") == {"webui"}

    def test_names_of_runtimes(self, alone, monkeypatch):
        monkeypatch.setattr("tests.support.shell.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(alone, "runtimes", "install", "") == set(environments.installable())
        assert self.completed(alone, "runtimes", "install", "fa") == {"faster_whisper"}
        folder = str(tiny.runtimes_dir())
        assert "llama_server" in self.completed(alone, "runtimes", "remove", "--runtimes-dir", folder, "")
        assert self.completed(alone, "runtimes", "remove", "--runtimes-dir", str(alone.home), "") == set()

    def test_kinds_of_events(self, alone, monkeypatch):
        monkeypatch.setattr("tests.support.shell.LLMUX", [LLMUX[0], "-c", PROGRAM])
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
        monkeypatch.setattr("tests.support.shell.LLMUX", [LLMUX[0], "-c", PROGRAM])
        assert self.completed(alone, "load", "") == set()


PROGRAM = "from supervisor.cli.main import main; main(prog_name='llmux')"
