"""What lies in `server.model_base_path` is a model, unless some model has it."""

from __future__ import annotations

import json
import shutil

import pytest

from runtimes.registry import REGISTRY
from supervisor.catalog import load_text
from supervisor.catalog.loading.runner_variables import is_runner
from supervisor.errors import NotFoundError
from tests.support import hf_folder, tiny
from tests.support.cases import cases


@pytest.fixture
def base(tmp_path):
    base = tmp_path / "models"
    base.mkdir()
    return base


def gguf(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tiny.model(name="tiny-chat"), path)
    return path


def found(base, *used, runtimes=None):
    """Runtime and path by name, besides those of models with the paths `used`."""
    models = {
        f"used{at}": {"path": str(path), "runtime": "llama_server" if path.suffix == ".gguf" else "transformers"}
        for at, path in enumerate(used)
    }
    server = {"model_base_path": str(base), "runtimes_dir": str(runtimes or base / "none")}
    catalog = load_text(json.dumps({"server": server, "models": models}), base.parent / "llmux.yaml")
    return {
        name: (model.adapter.name, str(model.config.path))
        for name, model in catalog.models.items()
        if name not in models
    }


class TestFound:
    """Names and entries."""

    def test_files_and_folders(self, base):
        file = gguf(base / "org/Repo/Tiny Chat-Q8_0.GGUF")
        folder = hf_folder.write(base / "org/Whole")
        assert found(base) == {
            "org/Repo/Tiny-Chat-Q8_0": ("llama_server", str(file)),
            "org/Whole": ("transformers", str(folder)),
        }

    def test_the_newest_in_the_cache_of_the_hub(self, base):
        repo = base / "cache/hub/models--Qwen--Qwen3-8B"
        for revision in ("old", "new"):
            hf_folder.write(repo / "snapshots" / revision)
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text("new\n")
        gguf(base / "cache/hub/models--Qwen--GGUF/snapshots/1/more.gguf")
        assert {name: path for name, (_, path) in found(base).items()} == {
            "Qwen/Qwen3-8B": str(repo / "snapshots/new"),
            "Qwen/GGUF/more": str(base / "cache/hub/models--Qwen--GGUF/snapshots/1/more.gguf"),
        }

    def test_vllm_where_it_is_installed(self, base, tmp_path):
        hf_folder.write(base / "a")
        (tmp_path / "runtimes/vllm_serve").mkdir(parents=True)
        (tmp_path / "runtimes/vllm_serve/llmux.json").write_text('{"device": "cuda"}')
        assert found(base, runtimes=tmp_path / "runtimes")["a"][0] == "vllm_serve"

    def test_what_is_no_model(self, base):
        (base / "cut.gguf").write_bytes(b"GGUF")
        (base / "config.json").write_text("{}")
        odd = hf_folder.write(base / "odd")
        (odd / "config.json").write_text(json.dumps({"architectures": ["Unheard"]}))
        torn = hf_folder.write(base / "torn")
        (torn / "config.json").write_text("{")
        assert found(base) == {}

    def test_nothing_there(self, base):
        assert found(base) == found(base / "missing") == {}

    def test_what_others_have(self, base):
        gguf(base / "a.gguf")
        other = gguf(base / "b.gguf")
        folder = hf_folder.write(base / "c")
        (base / "link").symlink_to(base / "c")
        assert found(base, other, base / "link").keys() == {"a"}
        assert found(base, other, folder).keys() == {"a"}


class TestHubIds:
    """The place of a model's files tells what it is called on the hub."""

    def resolved(self, folder, name):
        return folder.load("server: {model_base_path: models}", registry=REGISTRY).resolve(name).model.id

    def test_of_one_file(self, folder, base):
        gguf(base / "org/Repo/one.gguf")
        gguf(base / "hub/models--Qwen--Qwen3-8B-GGUF/snapshots/1/two.gguf")
        assert self.resolved(folder, "org/Repo") == "org/Repo/one"
        assert self.resolved(folder, "Qwen/Qwen3-8B-GGUF") == "Qwen/Qwen3-8B-GGUF/two"

    def test_of_several(self, folder, base):
        for name in ("one", "two"):
            gguf(base / f"org/Repo/{name}.gguf")
        with pytest.raises(NotFoundError, match=r"Several come from there: org/Repo/one, org/Repo/two\."):
            self.resolved(folder, "org/Repo")

    def test_of_an_entry(self, folder, base):
        gguf(base / "org/Repo/one.gguf")
        text = "server: {model_base_path: models}\nmodels: {mine: {path: models/org/Repo/one.gguf}}"
        assert folder.load(text, registry=REGISTRY).resolve("org/Repo").model.id == "mine"


class TestCatalog:
    """They are models like those of the file."""

    def load(self, folder, text):
        return folder.load(f"server: {{model_base_path: models}}\n{text}", registry=REGISTRY)

    def test_beside_those_of_the_file(self, folder, base):
        gguf(base / "a.gguf")
        gguf(base / "b.gguf")
        catalog = self.load(
            folder, "models: {mine: {path: models/a.gguf, n_ctx: 512}, off: {cmd: [x], enabled: false}}"
        )
        assert [row.name for row in catalog.listing()] == ["mine", "b"]
        assert catalog.models["b"].config.path == base / "b.gguf"
        assert str(catalog.origin("models", "b", "path")) == str(base / "b.gguf")

    def test_of_a_disabled_model_nothing_is_served(self, folder, base):
        gguf(base / "a.gguf")
        gguf(base / "b.gguf")
        assert [*self.load(folder, "models: {x: {path: models/a.gguf, enabled: false}}").models] == ["b"]

    def test_a_name_that_is_taken(self, folder, base):
        for name in ("a", "b", "c"):
            gguf(base / f"{name}.gguf")
        text = "models: {a: {path: models/b.gguf}}\nvirtual_models: {c: {model: a}}"
        assert [*self.load(folder, text).models] == ["a"]

    def test_what_could_be_no_model_is_left_out(self, folder, base):
        gguf(base / "twice#2.gguf")
        gguf(base / f"{'x' * 201}.gguf")
        gguf(base / "a.gguf")
        assert [*self.load(folder, "models:").models] == ["a"]


@cases(
    ("variables", "expected"),
    [
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "0", "LOG_LEVEL": "info", "LOG_FORMAT": "json", "HF_HOME": "/x"}, False),
        ({"MODEL_BASE_PATH": " ", "TENANT_RATE_LIMITER": "1"}, False),
        ({"MODEL_BASE_PATH": "/models"}, True),
        ({"VLLM_MAX_MODEL_LEN": "32768"}, True),
        ({"TENANT_RATE_LIMIT_default": "50req/min"}, True),
    ],
)
def test_whose_variables_are_a_runners(variables, expected):
    assert is_runner(variables) is expected
