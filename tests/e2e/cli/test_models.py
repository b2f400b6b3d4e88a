"""The commands about models: what they print for people and machines, and how they end."""

from __future__ import annotations

import json

import pytest

from supervisor.cli.exit_codes import ExitCode


class TestModels:
    """`ps`, `load`, `unload`."""

    def test_a_model_comes_and_goes(self, site, shell):
        loaded = shell("load", "chat")
        assert (loaded.returncode, loaded.stderr) == (ExitCode.DONE, "")
        head, row = loaded.stdout.splitlines()
        assert head.split()[:3] == ["MODEL", "STATE", "DEVICE"]
        assert row.split()[:4] == ["chat", "ready", "RAM", "(host)"]
        assert "thinker, quick" in row
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
        assert told.returncode == ExitCode.NOT_FOUND
        if "--json" in words:
            assert json.loads(told.stdout)["error"]["code"] == "model_not_found"
        else:
            assert told.stdout == ""
        assert "nope" in told.stderr
        assert "llmux ps" in told.stderr
