"""`llmux runtimes`."""

from __future__ import annotations

import json

from supervisor.cli.exit_codes import ExitCode
from tests.support import tiny


class TestRuntimes:
    """`runtimes list`, and what the others say of a runtime that isn't there."""

    def listed(self, shell, folder, *words):
        told = shell("runtimes", "list", "--json", "--runtimes-dir", str(folder), *words)
        return {row["name"]: row for row in json.loads(told.stdout)}

    def test_installed(self, alone):
        # This one alone: to import all that may be there takes a minute.
        (alone.home / "llama_server").symlink_to(tiny.runtimes_dir() / "llama_server")
        rows = self.listed(alone, alone.home, "--check")
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
        row = self.listed(alone, alone.home, "--check")["llama_server"]
        assert (row["state"], row["imports"], row["problem"]) == ("broken", False, "ImportError: libcudart.so.12")
        assert "runtimes remove" in row["remedy"]

    def test_without_a_check_nothing_is_started_or_walked(self, alone):
        """To import what is installed takes a minute, to walk through it a second; the record says enough."""
        environment = alone.home / "llama_server"
        (environment / "bin").mkdir(parents=True)
        record = json.loads((tiny.runtimes_dir() / "llama_server" / "llmux.json").read_text())
        (environment / "llmux.json").write_text(json.dumps({**record, "size_bytes": 7 << 20}))
        python = environment / "bin" / "python"
        python.write_text(f"#!/bin/sh\ntouch {alone.home}/started\n")
        python.chmod(0o755)
        row = self.listed(alone, alone.home)["llama_server"]
        assert (row["state"], row["imports"], row["size_mib"]) == ("installed", None, 7)
        assert not (alone.home / "started").exists()
        assert self.listed(alone, alone.home, "--check")["llama_server"]["imports"] is True
        assert (alone.home / "started").exists()

    def test_copyleft(self, alone):
        """Listed for every runtime, and told before anything is installed, which here can't be."""
        assert "pykakasi" in self.listed(alone, alone.home / "none")["chatterbox"]["copyleft"]
        assert self.listed(alone, alone.home / "none")["ctranslate2"]["copyleft"] == {}
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
