"""`llmux config`, which needs no daemon."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support.daemon import REPOSITORY
from tests.support.shell import LLMUX


class TestConfigCheck:
    """`config check` tells people and programs the same."""

    @pytest.mark.parametrize(
        ("text", "code", "problems"),
        [
            ("models: {a: {cmd: [cat, '${port}'], vram_mib: 1}}", ExitCode.DONE, []),
            ("models: {}\nsevrer: {}", ExitCode.USAGE, ["sevrer"]),
            ("server: {port: 9000}\nmodels: {}", ExitCode.USAGE, ["my.yaml:2:1 models: there are no models to serve"]),
        ],
    )
    def test_json(self, alone, text, code, problems):
        (alone.home / "my.yaml").write_text(text)
        done = alone("config", "check", "my.yaml", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, done.stderr, found["ok"]) == (code, "", not problems)
        assert len(found["problems"]) == len(problems)
        assert all(word in problem for word, problem in zip(problems, found["problems"], strict=True))
        assert alone("config", "check", "my.yaml").returncode == code

    def test_keys_belong_to_it(self, alone):
        """What `serve` would refuse: an open address without keys, a file of keys with mistakes."""
        (alone.home / "my.yaml").write_text(
            "server: {host: 0.0.0.0}\nmodels: {a: {cmd: [cat, '${port}'], vram_mib: 1}}\n"
        )
        told = alone("config", "check", "my.yaml")
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert "there are no API keys" in told.stderr
        keys = alone.home / "api_keys.yaml"
        keys.write_text("- {name: a, key: short}\n")
        keys.chmod(0o600)
        assert "could be guessed" in alone("config", "check", "my.yaml").stderr
        keys.write_text("- {name: a, key: sk-a-0123456789abc}\n")
        told = alone("config", "check", "my.yaml")
        assert (told.returncode, told.stdout) == (ExitCode.DONE, "No mistakes: 1 model, 1 public name.\n")

    def test_default_models(self, alone):
        (alone.home / "my.yaml").write_text(
            "models: {a: {cmd: [cat, '${port}'], vram_mib: 1}, b: {cmd: [cat, '${port}'], vram_mib: 1}}\n"
            "limits: {default_model: [b, a], default_after_s: 60}\n"
        )
        told = alone("config", "check", "my.yaml").stdout.splitlines()
        assert told[1:] == ["Back after 1 min in which nothing else is asked for: b, a."]
        assert json.loads(alone("config", "check", "my.yaml", "--json").stdout)["default_models"] == ["b", "a"]

    def test_serve_says_the_same(self, alone):
        (alone.home / "my.yaml").write_text("# nothing yet\n")
        told = alone("serve", "my.yaml")
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert "my.yaml: there are no models to serve" in told.stderr

    def test_without_a_file_it_says_what_to_do(self, alone):
        done = alone("config", "check")
        assert done.returncode == ExitCode.USAGE
        assert "llmux demo" in done.stderr


class TestNamingIt:
    """`--config PATH` everywhere, and PATH alone where nothing else could be meant."""

    @pytest.fixture(autouse=True)
    def files(self, alone):
        (alone.home / "my.yaml").write_text("models: {mine: {cmd: [cat, '${port}'], vram_mib: 1}}\n")

    @pytest.mark.parametrize("command", ["config check", "config show", "doctor"])
    @pytest.mark.parametrize("path", [["my.yaml"], ["--config", "my.yaml"], ["--config=my.yaml"]])
    def test_both_forms(self, alone, command, path):
        told = alone(*command.split(), *path, "--json")
        assert "mine" in told.stdout or "my.yaml: 1 models" in told.stdout

    @pytest.mark.parametrize("path", [["my.yaml"], ["--config", "my.yaml"]])
    def test_serve(self, alone, path):
        command = [*LLMUX, "serve", *path, "--port", "0", "--state-dir", "state", "--json"]
        with subprocess.Popen(
            command, env=alone.env(PYTHONPATH=str(REPOSITORY)), cwd=alone.home, stdout=subprocess.PIPE, text=True
        ) as daemon:
            try:
                assert json.loads(daemon.stdout.readline())["models"] == ["mine"]
            finally:
                daemon.terminate()

    @pytest.mark.parametrize("command", ["serve", "config check", "config show", "doctor", "service install"])
    def test_two_are_one_too_many(self, alone, command):
        told = alone(*command.split(), "my.yaml", "--config", "other.yaml")
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert f" {command} --config other.yaml" in told.stderr

    @pytest.mark.parametrize("command", ["pull", "bench", "keys add", "keys revoke"])
    def test_where_something_else_is_meant(self, alone, command):
        told = alone(*command.split(), "my.yaml")
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert "my.yaml is a configuration" in told.stderr
        assert f" {command} --config my.yaml" in told.stderr


class TestConfigShow:
    """`config show` tells what counts, whoever said it."""

    def test_options_of_serve(self, alone):
        (alone.home / "my.yaml").write_text("server: {port: 9000, log_level: error}\nmodels: {}\n")
        shown = alone("config", "show", "my.yaml", "--port", "9002", "--host", "::1", LLMUX_SERVER__PORT="9001").stdout
        assert "  port: 9002  # --port (flag)\n" in shown
        assert '  host: "::1"  # --host (flag)\n' in shown
        assert "  log_level: error  # my.yaml:1\n" in shown
        found = json.loads(alone("config", "show", "my.yaml", "--port", "9002", "--json").stdout)
        assert [(row["value"], row["layer"]) for row in found if row["key"] == "server.port"] == [(9002, "flag")]

    def test_schema_is_json_with_and_without_the_option(self, alone):
        assert alone("config", "schema", "--json").stdout == alone("config", "schema").stdout


class TestInit:
    """A first file, where `serve` looks for it."""

    def test_written_once(self, alone):
        path = alone.home / ".config" / "llmux" / "llmux.yaml"
        made = alone("config", "init")
        assert made.returncode == ExitCode.DONE
        assert made.stdout.splitlines() == [f"wrote {path}", f"wrote {path.with_name('llmux.schema.json')}"]
        assert path.stat().st_mode & 0o777 == 0o600
        text = path.read_text()
        again = alone("config", "init")
        assert (again.returncode, again.stdout) == (ExitCode.FAILED, "")
        assert "is there already" in again.stderr
        assert path.read_text() == text

    def test_its_settings_are_valid(self, alone):
        """With every `#` in front of a key removed, too."""
        (alone.home / "m.gguf").touch()
        named = json.loads(alone("config", "init", "mine.yaml", "--json").stdout)["written"]
        assert named == [str(alone.home / "mine.yaml"), str(alone.home / "llmux.schema.json")]
        path = alone.home / "mine.yaml"
        used = re.sub(r"(?m)^( *)#(?=[ a-z_-]*[a-z_-]+:)(?! )", r"\1", path.read_text())
        path.write_text(used.replace("~/models/my-model-Q4_K_M.gguf", "m.gguf"))
        shown = alone("config", "show", "mine.yaml", "--json")
        assert shown.returncode == ExitCode.DONE, shown.stderr
        assert {"models.my-model.n_ctx", "virtual_models.my-model-fast.model"} <= {
            row["key"] for row in json.loads(shown.stdout) if row["place"]
        }
