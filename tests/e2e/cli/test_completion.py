"""What a shell completes."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from supervisor.cli.commands.watch import KINDS
from supervisor.cli.environments import environments
from supervisor.cli.exit_codes import ExitCode
from tests.support import forker, installed, tiny
from tests.support.daemon import REPOSITORY
from tests.support.limits import LIMIT_S
from tests.support.shell import LLMUX, Shell

INSTALLED = ("-m", "tests.support.installed")


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
        asked = {"COMP_WORDS": " ".join(["llmux", *words]), "COMP_CWORD": str(len(words))}
        env = shell.env(PYTHONPATH=str(REPOSITORY), _LLMUX_COMPLETE="bash_complete", **asked)
        told = forker.run(INSTALLED, cwd=shell.home, env=env, timeout=LIMIT_S)
        assert told.stderr == ""
        return {line.partition(",")[2] for line in told.stdout.splitlines() if line}

    def test_names(self, shell):
        assert self.completed(shell, "load", "") == {"chat", "slow", "talker", "broken"}
        assert self.completed(shell, "load", "SL") == {"slow"}
        assert {"quick", "thinker"} <= self.completed(shell, "chat", "")
        assert "unload" in self.completed(shell, "un")

    def test_names_of_keys(self, alone):
        for name in ("webui", "ops"):
            assert alone("keys", "add", name).returncode == ExitCode.DONE
        assert self.completed(alone, "keys", "revoke", "w") == {"webui"}

    def test_names_of_runtimes(self, alone):
        assert self.completed(alone, "runtimes", "install", "") == set(environments.installable())
        assert self.completed(alone, "runtimes", "install", "fa") == {"faster_whisper"}
        folder = str(tiny.runtimes_dir())
        assert "llama_server" in self.completed(alone, "runtimes", "remove", "--runtimes-dir", folder, "")
        assert self.completed(alone, "runtimes", "remove", "--runtimes-dir", str(alone.home), "") == set()

    def test_kinds_of_events(self, alone):
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
        program.write_text(f"#!{LLMUX[0]}\n{Path(installed.__file__).read_text()}")
        program.chmod(0o755)
        asked = (
            'eval "$(llmux completion bash)"; COMP_WORDS=(llmux events --types "model,m"); COMP_CWORD=3; '
            '_llmux_completion llmux; echo "${COMPREPLY[@]}"'
        )
        env = alone.env(PYTHONPATH=str(REPOSITORY)) | {"PATH": f"{folder}:{os.environ['PATH']}"}
        told = subprocess.run(["bash", "-c", asked], env=env, capture_output=True, text=True, check=True)
        assert told.stdout == "model,memory\n"

    def test_no_daemon(self, alone):
        """The names of the configuration file; none, and no word, where there is none, or it has mistakes."""
        assert self.completed(alone, "load", "") == set()
        (alone.home / "llmux.yaml").write_text("models: {big: {}, small: {}}\nvirtual_models: {quick: {model: big}}\n")
        assert self.completed(alone, "load", "") == {"big", "small"}
        for command in ("chat", "run", "pull"):
            assert self.completed(alone, command, "") == {"big", "small", "quick"}
        assert self.completed(alone, "remove", "B") == {"big"}
        (alone.home / "other.yaml").write_text("models: {mine: {}}")
        assert self.completed(alone, "remove", "--config", "other.yaml", "") == {"mine"}
        for text in ("models: [", "- 1", "models: 3"):
            (alone.home / "llmux.yaml").write_text(text)
            assert self.completed(alone, "load", "") == set()
        assert self.completed(alone, "remove", "--config", "none.yaml", "") == set()

    def test_a_daemon_that_wants_a_key(self, tmp_path):
        alone = Shell(tmp_path)
        (tmp_path / "llmux.yaml").write_text("models: {big: {}}")
        with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as refusing:
            threading.Thread(target=refusing.handle_request).start()  # with 501
            alone.url = f"http://127.0.0.1:{refusing.server_port}"
            assert self.completed(alone, "load", "") == {"big"}
