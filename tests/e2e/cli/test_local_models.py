"""`llmux add FILE`, `add FOLDER`, `run FILE`: models that are on this disk already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from supervisor.catalog.models.local_models import find
from supervisor.cli.exit_codes import ExitCode
from supervisor.errors import NotFoundError
from tests.support import tiny
from tests.support.shell import Shell


@pytest.fixture
def model() -> Path:
    return tiny.model(name="tiny-chat")


@pytest.fixture
def shell(tmp_path) -> Shell:
    (tmp_path / "home").mkdir()
    variables = {"LLMUX_SERVER__RUNTIMES_DIR": str(tiny.runtimes_dir()), "LLMUX_SERVER__PORT": "9"}
    return Shell(tmp_path / "home", variables=variables)


def entered(shell: Shell) -> dict[str, dict[str, str]]:
    return yaml.safe_load((shell.home / ".config/llmux/llmux.yaml").read_text())["models"]


class TestAdd:
    def test_a_file(self, shell, tmp_path, model):
        file = tmp_path / "Tiny-Q4_K_M.gguf"
        shutil.copy(model, file)
        told = shell("add", str(file))
        assert told.returncode == 0, told.stderr
        assert entered(shell) == {"tiny-chat": {"path": str(file)}}
        assert "Use it: llmux run tiny-chat" in told.stderr
        again = shell("add", str(file))
        assert f"{file} is configured already, as tiny-chat." in again.stderr

    def test_nothing_is_entered_where_the_runtime_can_not_be_installed(self, shell, tmp_path, model):
        empty = {"LLMUX_SERVER__RUNTIMES_DIR": str(tmp_path / "none"), "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path)}
        told = shell("add", str(model), **empty)
        assert told.returncode != 0
        assert not (shell.home / ".config").exists()

    def test_a_folder(self, shell, tmp_path, model):
        folder = tmp_path / "models"
        (folder / "vision").mkdir(parents=True)
        for name in (
            "One.gguf",
            "Two-00001-of-00002.gguf",
            "Two-00002-of-00002.gguf",
            "vision/Eyes.gguf",
            "vision/one.gguf",
        ):
            shutil.copy(model, folder / name)
        (folder / "Half.gguf").write_bytes(model.read_bytes()[: model.stat().st_size // 2])
        (folder / "notes.gguf").write_text("not a model")
        told = shell("add", str(folder), "--json")
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)["names"] == ["tiny-chat", "two", "eyes", "one"]
        assert {name: Path(entry["path"]).name for name, entry in entered(shell).items()} == {
            "tiny-chat": "One.gguf",
            "two": "Two-00001-of-00002.gguf",
            "eyes": "Eyes.gguf",
            "one": "one.gguf",
        }
        assert f"{folder}/Half.gguf: it is cut short" in told.stderr
        assert f"{folder}/notes.gguf: not a readable GGUF file (it doesn't begin with GGUF)" in told.stderr

    def test_what_is_not_there(self, shell, tmp_path):
        told = shell("add", str(tmp_path / "gone.gguf"))
        assert (told.returncode, "there is no such file or folder" in told.stderr) == (ExitCode.NOT_FOUND, True)
        (tmp_path / "empty").mkdir()
        assert "has no model in it" in shell("add", str(tmp_path / "empty")).stderr
        assert not (shell.home / ".config").exists()

    def test_a_dry_run_enters_nothing(self, shell, model):
        assert str(model) in shell("add", str(model), "--dry-run").stderr
        assert not (shell.home / ".config").exists()


def test_run_a_file(shell, model):
    told = shell("run", str(model), "Hello", timeout=120)
    assert told.stdout.strip().endswith("Hello from a tiny model"), told.stderr


class TestProjectors:
    """A projector belongs to the model beside it."""

    def test_the_only_one(self, tmp_path, model):
        shutil.copy(model, tmp_path / "Eyes-Q4_K_M.gguf")
        projector = tmp_path / "mmproj-F16.gguf"
        shutil.copy(tiny.projector(), projector)
        (found,), problems = find(tmp_path)
        assert (found.projector, problems) == (projector, [])
        assert find(projector)[1] == [f"{projector} is a projector: it gives a model eyes or ears, and is none itself"]

    def test_nothing_there(self, tmp_path):
        with pytest.raises(NotFoundError):
            find(tmp_path / "gone")


def test_config_check_finds_what_is_no_model(shell, tmp_path, model):
    half = tmp_path / "half.gguf"
    half.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    config = tmp_path / "llmux.yaml"
    shutil.copy(model, tmp_path / "whole.gguf")
    config.write_text(f"models:\n  half: {{path: {half}}}\n  folder: {{path: {tmp_path}, runtime: llama_server}}\n")
    told = shell("config", "check", str(config))
    said = " ".join((told.stdout + told.stderr).split())
    assert "half.gguf: it is cut short" in said
    assert "is a folder; name a file in it: half.gguf, whole.gguf" in said
