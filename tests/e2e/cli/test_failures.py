"""What the system refuses: a sentence that says what to do, never a traceback; and for programs JSON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support import forker
from tests.support.daemon import REPOSITORY
from tests.support.shell import LLMUX

MODEL = {"cmd": ["sleep", "${port}"], "vram_mib": 1}


class Stranger:
    """Runs commands with an empty environment, in a folder that can only be read; where possible as a user unknown here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], **variables}
        module = "tests.support.stranger" if os.geteuid() == 0 else "tests.support.installed"
        return forker.run(["-m", module, *words], cwd=self.folder, env=env, timeout=60)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    """Not below the tests' own folders, which are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.yaml").write_text(json.dumps({"models": {"a": MODEL}}))
        (folder / "swap.yaml").write_text("models: {a: {cmd: 'x --port ${PORT}'}}")
        folder.chmod(0o555)
        yield Stranger(folder)
        folder.chmod(0o755)


class TestUnwritable:
    """Where the folders of configuration, state and data can't be made."""

    @pytest.mark.parametrize(
        ("words", "setting"),
        [
            ("config init", "XDG_CONFIG_HOME"),
            ("keys add me", "XDG_CONFIG_HOME"),
            ("service install --config mine.yaml", "XDG_CONFIG_HOME"),
            ("add acme/x", "XDG_CONFIG_HOME"),
            ("demo", "XDG_STATE_HOME"),
            ("serve --config mine.yaml", "server.state_dir"),
            ("runtimes install llama_server", "server.runtimes_dir"),
            ("config import swap.yaml --from llama-swap -o here.yaml", "another place"),
            ("config example --to here", "--to"),
        ],
    )
    def test_says_what_to_set(self, stranger, words, setting):
        told = stranger(*words.split(), HOME=str(stranger.folder / "home"), LLMUX_ALLOW_WRITABLE_CONFIG="1")
        assert "Traceback" not in told.stderr
        assert told.returncode == ExitCode.FAILED, told.stderr
        assert setting in told.stderr

    def test_in_json(self, stranger):
        told = stranger("config", "init", "--json", HOME=str(stranger.folder / "home"))
        error = json.loads(told.stdout)["error"]
        assert (error["code"], error["exit_code"]) == ("os_error", ExitCode.FAILED)
        assert error["message"] in told.stderr


class TestNoCurrentFolder:
    """It was removed while the shell was in it."""

    def test_says_so(self, alone):
        gone = 'mkdir gone && cd gone && rmdir ../gone && "$@"'
        told = subprocess.run(
            ["sh", "-c", gone, "sh", *LLMUX, "config", "check"],
            env=alone.env(PYTHONPATH=str(REPOSITORY)),
            cwd=alone.home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert told.returncode == ExitCode.FAILED
        assert told.stderr == "llmux: The current folder is gone. Change to one that is there.\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody whom the system doesn't know")
class TestNoHome:
    """No HOME, and no entry for the user."""

    @pytest.mark.parametrize("words", ["serve", "keys list", "runtimes list", "service status", "run acme/x", "doctor"])
    def test_says_what_to_set(self, stranger, words):
        told = stranger(*words.split())
        assert told.returncode == ExitCode.FAILED
        assert "Set HOME, or XDG_" in told.stderr.splitlines()[-1]

    @pytest.mark.parametrize("words", ["llmux keys revoke ", "llmux runtimes remove "])
    def test_completes_nothing(self, stranger, words):
        told = stranger(_LLMUX_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD="3")
        assert (told.stdout.strip(), told.stderr) == ("", "")

    def test_is_not_needed_where_all_places_are_named(self, stranger):
        places = {name: str(stranger.folder / name) for name in ("state_dir", "runtimes_dir", "models_dir")}
        (stranger.folder / "own.yaml").write_text(json.dumps({"server": places, "models": {"a": MODEL}}))
        told = stranger("config", "check", "own.yaml", LLMUX_ALLOW_WRITABLE_CONFIG="1")
        assert (told.returncode, told.stderr) == (ExitCode.DONE, "")


class TestForPrograms:
    """With --json, one object on stdout says what failed; the sentence for people is on stderr all the same."""

    @pytest.mark.parametrize(
        ("words", "code", "exit_code"),
        [
            ("ps --json", "unavailable", ExitCode.UNREACHABLE),
            ("ps --json --url nowhere", "invalid_request", ExitCode.FAILED),
            ("load --json", "invalid_usage", ExitCode.USAGE),
            ("no-such-command --json", "invalid_usage", ExitCode.USAGE),
            ("runtimes remove nothing --json", "not_found", ExitCode.NOT_FOUND),
            ("serve --config missing.yaml --json", "invalid_configuration", ExitCode.USAGE),
        ],
    )
    def test_error(self, alone, words, code, exit_code):
        (alone.home / "missing.yaml").write_text("models: [")
        told = alone(*words.split())
        error = json.loads(told.stdout)["error"]
        assert (error["code"], error["exit_code"], told.returncode) == (code, exit_code, exit_code)
        assert error["message"].splitlines()[0] in told.stderr

    def test_results_that_tell_it_themselves(self, alone):
        (alone.home / "mine.yaml").write_text("models: {a: {}}")  # that can't run
        told = alone("config", "check", "mine.yaml", "--json")
        assert json.loads(told.stdout)["ok"] is False

    def test_without_json_nothing_is_on_stdout(self, alone):
        assert alone("chat", "x", "--", "--json").stdout == ""


class TestClosedStreams:
    """Whoever closes them wants none of it: a command does its work all the same."""

    @pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
    def test_no_traceback(self, alone, closed):
        told = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *LLMUX, "runtimes", "list"],
            env=alone.env(PYTHONPATH=str(REPOSITORY)),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (told.returncode, told.stdout, "Traceback" in told.stderr) == (ExitCode.DONE, "", False)


class TestVersion:
    """However people ask for it."""

    def test_version(self, alone):
        shown = {alone(*words).stdout for words in (("--version",), ("-V",), ("version",))}
        assert len(shown) == 1
        assert json.loads(alone("version", "--json").stdout)["version"] in shown.pop()


class TestUrl:
    """The daemon's address, or that of its API, as clients are given it; else as `serve` would find it."""

    def test_the_configured_one(self, alone, site):
        """By the variables alone, or by a file."""
        alone.url = None
        named = {"XDG_RUNTIME_DIR": str(alone.home)}
        assert alone("ps", **named, LLMUX_SERVER__PORT=str(site.port)).returncode == ExitCode.DONE
        (alone.home / "llmux.yaml").write_text(f"server: {{port: {site.port}}}")
        assert alone("why", **named).returncode == ExitCode.DONE

    def test_any_form(self, shell, site):
        for suffix in ("/", "/v1", "/v1/"):
            told = shell("ps", "--url", site.url + suffix)
            assert told.returncode == ExitCode.DONE, told.stderr
