"""The commands that need no daemon: config, keys and runtimes."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from supervisor.cli.exit_codes import ExitCode
from tests import tiny
from tests.cli.conftest import LLMUX
from tests.daemon import REPOSITORY

FILE = """\
# who may come in
keys:
  # the chat server
  - name: webui
    key: sk-webui-0123456789
    scopes: [inference]  # not admin

  # the operators
  - name: ops
    key_sha256: 1111111111111111111111111111111111111111111111111111111111111111
    scopes:
      - admin
      - metrics
  # the last one
  - {name: old, key: sk-old-0123456789, expires: 2020-01-31}
"""


class TestConfigCheck:
    """`config check` tells people and programs the same."""

    @pytest.mark.parametrize(
        ("text", "code", "problems"),
        [
            ("models: {a: {cmd: [cat], vram_mib: 1}}", ExitCode.DONE, []),
            ("models: {}\nsevrer: {}", ExitCode.USAGE, ["sevrer"]),
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
        (alone.home / "my.yaml").write_text("server: {host: 0.0.0.0}\nmodels: {a: {cmd: [cat], vram_mib: 1}}\n")
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

    def test_without_a_file_it_says_what_to_do(self, alone):
        done = alone("config", "check")
        assert done.returncode == ExitCode.USAGE
        assert "llmux demo" in done.stderr


class TestNamingIt:
    """`--config PATH` everywhere, and PATH alone where nothing else could be meant."""

    @pytest.fixture(autouse=True)
    def files(self, alone):
        (alone.home / "my.yaml").write_text("models: {mine: {cmd: [cat], vram_mib: 1}}\n")

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


class TestKeys:
    """`keys add`, `list`, `revoke` on a file with comments."""

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "api_keys.yaml"
        path.write_text(FILE)
        return path

    def test_list(self, alone, path):
        shown = alone("keys", "list", "--file", str(path)).stdout
        assert "sk-" not in shown
        assert "1111" not in shown
        rows = {line.split()[0]: line for line in shown.splitlines()[1:]}
        assert "admin, metrics" in rows["ops"]
        assert rows["webui"].endswith("valid")
        assert "2020-01-31" in rows["old"]
        assert rows["old"].endswith("expired")
        data = json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"]
        assert [entry["name"] for entry in data] == ["webui", "ops", "old"]

    def test_list_of_nothing(self, alone):
        none = alone("keys", "list")
        assert (none.returncode, none.stdout) == (ExitCode.DONE, "")
        assert "llmux keys add" in none.stderr

    @pytest.mark.parametrize("name", ["webui", "ops", "old"])
    def test_revoke_keeps_the_rest_as_it_is(self, alone, path, name):
        done = alone("keys", "revoke", name, "--file", str(path))
        assert (done.returncode, done.stdout) == (ExitCode.DONE, "")
        left = path.read_text()
        entries = yaml.safe_load(FILE)["keys"]
        assert yaml.safe_load(left)["keys"] == [entry for entry in entries if entry["name"] != name]
        assert set(left.splitlines()) < set(FILE.splitlines())
        for comment in ("# who may come in", "# the chat server", "# the operators", "# the last one"):
            assert comment in left
        assert path.stat().st_mode & 0o777 == 0o600

    def test_revoke_all(self, alone, path):
        for name in ("ops", "webui", "old"):
            done = alone("keys", "revoke", name, "--file", str(path))
            assert done.returncode == ExitCode.DONE, done.stderr
        assert "last key" in done.stderr
        assert alone("keys", "list", "--file", str(path)).stdout == ""
        assert alone("keys", "add", "new", "--file", str(path)).returncode == ExitCode.DONE

    def test_revoke_in_a_list_of_one_line(self, alone, path):
        path.write_text("[{name: a, key: sk-a-0123456789abc}, {name: b, key: sk-b-0123456789abc}]  # both\n")
        done = alone("keys", "revoke", "a", "--file", str(path), "--json")
        assert json.loads(done.stdout)["left"] == ["b"]
        assert "comments are lost" in done.stderr
        assert [entry["name"] for entry in yaml.safe_load(path.read_text())] == ["b"]

    def test_revoke_unknown(self, alone, path):
        told = alone("keys", "revoke", "webiu", "--file", str(path))
        assert told.returncode == ExitCode.NOT_FOUND
        assert "'webui'" in told.stderr
        assert path.read_text() == FILE
        assert alone("keys", "revoke", "a").returncode == ExitCode.NOT_FOUND

    @pytest.mark.parametrize(
        "words", [("",), ("a\nb",), ("x" * 101,), ("a", "--expires", "never"), ("a", "--scope", "root")]
    )
    def test_names_and_dates_that_are_none(self, alone, path, words):
        told = alone("keys", "add", *words, "--file", str(path))
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert "sk-llmux" not in told.stderr
        assert path.read_text() == FILE

    def test_the_old_name_of_add(self, alone, path):
        assert alone("keys", "new", "a", "--file", str(path)).returncode == ExitCode.DONE
        assert " new" not in alone("keys", "--help").stdout
        made = json.loads(alone("keys", "add", "b", "--file", str(path), "--json").stdout)
        assert made["key"].startswith("sk-llmux-")
        assert made["key"] not in path.read_text()


class TestRuntimes:
    """`runtimes list`, and what the others say of a runtime that isn't there."""

    def listed(self, shell, folder):
        told = shell("runtimes", "list", "--json", "--runtimes-dir", str(folder))
        return {row["name"]: row for row in json.loads(told.stdout)}

    def test_installed(self, alone):
        # This one alone: to import all that may be there takes a minute.
        (alone.home / "llama_server").symlink_to(tiny.runtimes_dir() / "llama_server")
        rows = self.listed(alone, alone.home)
        row = rows["llama_server"]
        assert (row["state"], row["imports"], row["remedy"]) == ("installed", True, None)
        assert row["size_mib"] > 10
        assert rows["command"]["state"] == "not needed"
        shown = alone("runtimes", "list", "--runtimes-dir", str(alone.home)).stdout
        assert "xllamacpp==" in shown

    def test_not_installed(self, alone):
        row = self.listed(alone, alone.home / "none")["llama_server"]
        assert (row["state"], row["remedy"]) == ("not installed", "llmux runtimes install llama_server")

    def test_broken(self, alone):
        live = (tiny.runtimes_dir() / "llama_server").resolve()
        broken = alone.home / "llama_server"
        (broken / "bin").mkdir(parents=True)
        (broken / "llmux.json").write_text((live / "llmux.json").read_text())
        python = broken / "bin" / "python"
        python.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.12' >&2\nexit 1\n")
        python.chmod(0o755)
        row = self.listed(alone, alone.home)["llama_server"]
        assert (row["state"], row["imports"], row["problem"]) == ("broken", False, "ImportError: libcudart.so.12")
        assert "runtimes remove" in row["remedy"]

    def test_copyleft(self, alone):
        """Listed for every runtime, and told before anything is installed, which here can't be."""
        assert "pykakasi" in self.listed(alone, alone.home / "none")["chatterbox"]["copyleft"]
        assert self.listed(alone, alone.home / "none")["llama_server"]["copyleft"] == {}
        nowhere = alone.home / "file"
        nowhere.write_text("")
        told = alone("runtimes", "install", "chatterbox", "--runtimes-dir", str(nowhere))
        assert told.returncode != ExitCode.DONE
        assert "pykakasi (GPL-3.0-or-later)" in told.stdout

    def test_unknown(self, alone):
        for word in ("install", "remove"):
            told = alone("runtimes", word, "nothing")
            assert told.returncode == ExitCode.NOT_FOUND
            assert "llama_server" in told.stderr

    def test_installing_what_is_there(self, alone):
        words = ("runtimes", "install", "llama_server", "--runtimes-dir", str(tiny.runtimes_dir()))
        assert "already installed" in alone(*words).stdout
        told = alone(*words, "--json")
        assert json.loads(told.stdout)["state"] == "installed"
        assert "already installed" in told.stderr
        with alone.terminal(*words) as terminal:
            assert terminal.end() == ExitCode.DONE
            assert "already installed" in terminal.screen
