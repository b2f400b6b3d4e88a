"""`models_from`, and `llmux serve FOLDER`: what lies in a folder is served, as long as it lies there."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from supervisor.cli.configuration import of_folder
from tests.support import environments, forker, tiny, tiny_language
from tests.support.daemon import Daemon, running, wait_until
from tests.support.ports import quiet_ports
from tests.support.shell import LLMUX, Shell

LONG = " ".join(f"word{number}" for number in range(600))


@pytest.fixture
def models(tmp_path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def names(daemon: Daemon) -> set[str]:
    return {model["id"] for model in daemon.get("/v1/models").json()["data"]}


def test_files_come_and_go(tmp_path, models):
    """Half a file is none; a whole one answers; a model whose file goes first ends what it says."""
    long = tiny.model(name="tiny-long", answer=LONG)
    with running(tmp_path, {"models_from": [str(models)]}) as daemon:
        assert names(daemon) == set()
        content = tiny.model(name="tiny-chat").read_bytes()
        (models / "one.gguf").write_bytes(content[:-1])
        wait_until(lambda: daemon.events("model.unread"), what="the half is told")
        assert names(daemon) == set()
        with (models / "one.gguf").open("ab") as file:
            file.write(content[-1:])
        wait_until(lambda: names(daemon) == {"tiny-chat"}, what="the whole one is served")
        assert daemon.chat("tiny-chat").json()["choices"][0]["message"]["content"] == tiny.ANSWER
        shutil.copy(long, models / "two.gguf")
        wait_until(lambda: "tiny-long" in names(daemon), what="the second is served")
        ask = {"model": "tiny-long", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=ask) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            (models / "two.gguf").unlink()
            (models / "one.gguf").unlink()
            wait_until(lambda: "tiny-chat" not in names(daemon), what="the idle one is gone")
            assert "[DONE]" in [line.removeprefix("data: ") for line in lines][-2:]
        wait_until(lambda: names(daemon) == set(), what="the other is gone, too")
        assert daemon.chat("tiny-chat").status_code == 404
        wait_until(lambda: not daemon.workers(), what="their workers end")


def test_what_goes_for_a_moment(tmp_path, models):
    """A folder that is away keeps its models; a name for a model that is away hinders nothing else."""
    shutil.copy(tiny.model(name="tiny-chat"), models / "one.gguf")
    config = {"models_from": str(models), "virtual_models": {"short": {"model": "tiny-chat"}}}
    with running(tmp_path, config) as daemon:
        assert names(daemon) == {"short"}
        away = models.rename(tmp_path / "away")
        told = daemon.post("/v1/admin/reload")
        assert (told.status_code, "is away, and 1 models with it" in told.text) == (400, True), told.text
        assert names(daemon) == {"short"}
        away.rename(models)
        (models / "one.gguf").unlink()
        shutil.copy(tiny.model(name="tiny-long", answer=LONG), models / "two.gguf")
        wait_until(lambda: names(daemon) == {"tiny-long"}, what="the new one is served, without the name of the old")


def test_a_folder_of_hugging_face(tmp_path, models):
    environments.installed("transformers")
    shutil.copytree(tiny_language.model("qwen3"), models / "Qwen3-Tiny")
    with running(tmp_path, {"models_from": str(models)}) as daemon:
        assert names(daemon) == {"qwen3-tiny"}
        answer = daemon.chat("qwen3-tiny").json()
        assert answer["choices"][0]["message"]["content"] == tiny_language.ANSWER


class TestServe:
    """`llmux serve FOLDER`."""

    @pytest.fixture
    def shell(self, tmp_path) -> Shell:
        (tmp_path / "home").mkdir()
        return Shell(tmp_path / "home", variables={"LLMUX_SERVER__RUNTIMES_DIR": str(tiny.runtimes_dir())})

    @pytest.mark.parametrize("alone", [False, True], ids=["a folder", "a file"])
    def test_without_a_configuration(self, shell, tmp_path, models, alone):
        shutil.copy(tiny.model(name="tiny-chat"), models / "one.gguf")
        place = models / "one.gguf" if alone else models
        words = (*LLMUX[1:], "serve", str(place), "--port", str(quiet_ports(1)), "--json")
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("wb") as told, err.open("wb") as log, Path("/dev/null").open("rb") as nothing:
            process = forker.start(words, cwd=tmp_path, env=shell.env(), stdin=nothing, stdout=told, stderr=log)
        try:
            wait_until(lambda: process.poll() is not None or out.read_text(), what="it listens")
            assert process.poll() is None, err.read_text()
            shell.url = json.loads(out.read_text())["url"]
            told = shell("run", "tiny-chat", "Hello")
            assert told.stdout.strip() == tiny.ANSWER, told.stderr
            assert not (shell.home / ".config").exists()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()

    @pytest.mark.parametrize("name", ["llmux.yaml", "local.yaml", "tasks.yaml"])
    def test_what_lies_beside_the_models_is_not_read(self, tmp_path, models, name):
        """It may have come with them."""
        (models / name).write_text("models: {evil: {runtime: command, cmd: [sh, -c, 'touch /tmp/x'], preload: true}}\n")
        shutil.copy(tiny.model(name="tiny-chat"), models / "one.gguf")
        models.chmod(0o777)  # where anybody may put one
        catalog = of_folder(models, {"server.state_dir": str(tmp_path)}).read(check_files=False)
        assert list(catalog.models) == ["tiny-chat"]


def test_what_a_folder_has_is_not_removed_from_the_configuration(tmp_path, models):
    shutil.copy(tiny.model(name="tiny-chat"), models / "one.gguf")
    config = tmp_path / "llmux.yaml"
    config.write_text(f"models_from: [{models}]\n")
    (tmp_path / "home").mkdir()
    shell = Shell(tmp_path / "home")
    told = shell("remove", "tiny-chat", "--config", str(config), "--yes")
    assert "it is one of the models of a folder (models_from)" in " ".join(told.stderr.split())
    shown = shell("config", "show", str(config)).stdout
    assert "models_from:" in shown
    assert f"path: {models}/one.gguf" in shown
