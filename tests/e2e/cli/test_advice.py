"""The `llmux` command against a running daemon: what it prints, how it exits, and what it advises."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support import shell, tiny
from tests.support.daemon import Daemon, fake, running
from tests.support.limits import LIMIT_S

ADMIN = "sk-test-admin-0000000000000000"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    config = {
        "models": {
            "first": fake(),
            "org/second:7b": fake(),
            "silent": {"cmd": ["false", "${port}"], "vram_mib": 1},
            "never": fake(),
            "broken": fake("--exit-code", "1", "--log-text", "no such file: weights.bin"),
        },
        "virtual_models": {"alias": {"model": "first"}},
        "limits": {"crash_limit": 1},
    }
    with running(tmp_path_factory.mktemp("cli"), config) as started:
        yield started


@pytest.fixture
def llmux(daemon):
    def run(*words: str, url: str | None = daemon.url, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LLMUX_")}
        clean |= ({"LLMUX_URL": url} if url is not None else {}) | env
        return shell.llmux(*words, env=clean, timeout=LIMIT_S)

    return run


def said(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    assert (done.returncode, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr


class TestLoading:
    """load, ps, unload, by any name of a model."""

    def test_load_ps_unload(self, llmux, daemon):
        loaded = llmux("load", "alias")
        assert loaded.returncode == 0, loaded.stderr
        assert daemon.model("first")["state"] == "ready"
        listed = llmux("ps")
        header, *rows = listed.stdout.splitlines()
        assert header.split()[:3] == ["MODEL", "STATE", "DEVICE"]
        assert rows[0].split()[:2] == ["first", "ready"]
        assert loaded.stdout.splitlines()[0].split()[:2] == header.split()[:2]
        unloaded = llmux("unload", "first", "--force")
        assert unloaded.returncode == 0
        assert daemon.model("first")["state"] == "stopped"

    def test_json(self, llmux):
        rows = json.loads(llmux("ps", "--json").stdout)["data"]
        assert [row["name"] for row in rows] == ["first", "org/second:7b", "silent", "never", "broken"]
        assert json.loads(llmux("load", "first", "--json").stdout)["state"] == "ready"
        assert json.loads(llmux("unload", "first", "--json").stdout)["state"] == "stopped"

    def test_a_name_with_a_slash(self, llmux, daemon):
        assert llmux("load", "org/second:7b").returncode == 0
        assert daemon.model("org/second:7b")["state"] == "ready"
        assert "org/second:7b" not in llmux("why", "first").stdout
        assert "loaded in" in llmux("why", "org/second:7b").stdout

    def test_broken(self, llmux):
        text = said(llmux("load", "broken"))
        assert text.startswith("llmux: broken was not loaded")
        assert "  no such file: weights.bin" in text

    def test_no_last_words_of_a_worker_that_wrote_nothing(self, llmux):
        """Neither `load` nor `logs` sends anybody to an empty log."""
        text = said(llmux("load", "silent"))
        assert "llmux why silent" in text
        assert "llmux logs silent" not in text
        told = llmux("logs", "silent").stderr
        assert "llmux why silent" in told
        assert "llmux load" not in told
        assert "llmux load never" in llmux("logs", "never").stderr

    def test_unknown(self, llmux):
        assert "Did you mean 'first'?" in said(llmux("load", "frist"), ExitCode.NOT_FOUND)


class TestWhy:
    """why tells what was decided, of one model or of all."""

    def test_one(self, llmux):
        llmux("load", "first")
        done = llmux("why", "alias", "--limit", "5")
        assert done.returncode == 0
        assert "load" in done.stdout
        assert "second" not in done.stdout

    def test_all(self, llmux):
        llmux("load", "first")
        assert "first" in llmux("why").stdout
        assert json.loads(llmux("why", "--json").stdout)["object"] == "list"

    def test_unknown(self, llmux):
        assert "There is no model 'nobody'" in said(llmux("why", "nobody"), ExitCode.NOT_FOUND)


class TestWithoutADaemon:
    """What can't be asked says what to do next."""

    def test_nobody_answers(self, llmux, tmp_path):
        text = said(llmux("ps", url="http://127.0.0.1:9", XDG_RUNTIME_DIR=str(tmp_path)), ExitCode.UNREACHABLE)
        assert "No daemon answers at http://127.0.0.1:9" in text
        assert "llmux serve" in text

    @pytest.mark.parametrize("url", ["nonsense", "http://[", "http://127.0.0.1:99999"])
    def test_no_url(self, llmux, url):
        assert url in said(llmux("ps", url=url))

    def test_something_else_answers(self, llmux, daemon):
        llmux("load", "first")
        port = daemon.model("first")["worker"]["port"]
        text = said(llmux("ps", url=f"http://127.0.0.1:{port}"), ExitCode.NOT_FOUND)
        assert "no such path" in text or "is not llmux" in text

    def test_wrong_usage(self, llmux):
        assert "Usage" in said(llmux("load"), 2)
        assert "No such command" in said(llmux("lod"), 2)

    def test_a_proxy_is_not_asked(self, llmux):
        proxy = "http://127.0.0.1:9"
        assert llmux("ps", HTTP_PROXY=proxy, http_proxy=proxy, ALL_PROXY=proxy).returncode == 0


class TestKeys:
    """A guarded daemon wants a key, and the command says which and how to get one."""

    def test_with_and_without(self, llmux, tmp_path):
        (tmp_path / "api_keys.yaml").write_text(f"- {{name: ops, key: {ADMIN}, scopes: [admin]}}\n")
        guarded = Daemon(tmp_path, {"models": {"first": fake()}})
        try:
            guarded.start()
            text = said(llmux("ps", url=guarded.url), ExitCode.REFUSED)
            assert "$LLMUX_API_KEY" in text
            assert "llmux keys add NAME --scope admin" in text
            assert "not known" in said(llmux("ps", "--key", "nonsense", url=guarded.url), ExitCode.REFUSED)
            assert llmux("ps", "--key", ADMIN, url=guarded.url).returncode == 0
            assert llmux("ps", url=guarded.url, LLMUX_API_KEY=ADMIN).returncode == 0
        finally:
            guarded.stop()


class TestConfiguration:
    """config check finds every mistake; runtimes list tells what is there."""

    def test_check(self, llmux, tmp_path, daemon):
        good = llmux("config", "check", str(daemon.config_path))
        assert good.returncode == 0, good.stderr
        assert "5 models" in good.stdout
        bad = tmp_path / "bad.yaml"
        bad.write_text("models:\n  a: {runtime: lama_server}\nlimits: {queue_totl: 5, body_mib: much}\n")
        text = said(llmux("config", "check", str(bad)), 2)
        for clue in ('did you mean "llama_server"', 'did you mean "queue_total"', "body_mib"):
            assert clue in text
        assert "there is no such file" in said(llmux("config", "check", str(tmp_path / "none.yaml")), 2)

    def test_runtimes(self, llmux, tmp_path):
        # This one alone: each that is there is tried, and other tests may have installed large ones beside it.
        (tmp_path / "llama_server").symlink_to(tiny.runtimes_dir() / "llama_server")
        listed = llmux("runtimes", "list", "--runtimes-dir", str(tmp_path))
        assert re.search(r"^llama_server +installed", listed.stdout, re.MULTILINE)
        empty = json.loads(llmux("runtimes", "list", "--json", "--runtimes-dir", "/nonexistent").stdout)
        rows = {row["name"]: row for row in empty}
        assert rows["llama_server"]["state"] == "not installed"
        assert rows["llama_server"]["remedy"] == "llmux runtimes install llama_server"
        assert rows["command"]["state"] == "not needed"
        assert "llama_server" in said(llmux("runtimes", "install", "lama"), ExitCode.NOT_FOUND)
