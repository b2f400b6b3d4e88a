"""What files and folders of models say of themselves: names, purpose, runtime, whether they are whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gguf.constants import GGML_QUANT_SIZES

from runtimes.llama_server.adapter import gguf_meta
from runtimes.registry import REGISTRY
from supervisor.catalog import load_text
from supervisor.catalog.assembly import is_name
from supervisor.catalog.models.local_models import _names, find, runtime_of
from supervisor.core.types import ModelId
from supervisor.daemon.configuration.reload import _with_removed_busy
from supervisor.errors import ConfigError, NotFoundError
from tests.support import hf_folder, tiny
from tests.support.cases import cases


@pytest.fixture
def model() -> Path:
    return tiny.model(name="tiny-chat")


class TestFolders:
    """The runtime of a repository without GGUF files."""

    @cases(
        ("architecture", "files", "wanted"),
        [
            ("Qwen3ForCausalLM", (), {"runtime": "transformers"}),
            ("Gemma3ForConditionalGeneration", (), {"runtime": "transformers"}),
            ("WhisperForConditionalGeneration", (), {"runtime": "transformers", "type": "asr"}),
            ("SiglipModel", (), {"runtime": "embeddings", "type": "vision"}),
            ("XLMRobertaModel", ("modules.json",), {"runtime": "embeddings"}),
            ("BertForSequenceClassification", (), {"runtime": "embeddings"}),
            ("BertModel", (), None),
            ("StableDiffusionPipeline", (), None),
        ],
    )
    def test_runtime(self, architecture, files, wanted):
        assert runtime_of([architecture], dict.fromkeys(files)) == wanted
        if wanted is not None:
            REGISTRY.get(wanted["runtime"]).config.model_validate({**wanted, "path": "/x"})


class TestNames:
    """The metadata's, unless it says nothing; then the file's."""

    @cases(
        ("said", "stem", "wanted"),
        [
            ("Qwen3 8B", "Qwen3-8B-Q4_K_M", ("qwen3-8b", "qwen3-8b-q4_k_m")),
            ("Meta Llama 3.1 8B Instruct", "llama", ("meta-llama-3.1-8b-instruct", "llama")),
            ("models", "gemma-3-4b-it-Q8_0", ("gemma-3-4b-it-q8_0",)),
            (".", "Phi 4 mini", ("phi-4-mini",)),
            ("3b1f0f2a5c7e9d1b3b1f0f2a5c7e9d1b3b1f0f2a", "x", ("x",)),
            ("", "été", ("t",)),
            ("\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", ("model",)),
        ],
    )
    def test_names(self, said, stem, wanted):
        assert _names(said, stem) == wanted
        assert all(map(is_name, wanted))


class TestFind:
    """A tree with everything that people have in one."""

    def test_a_tree(self, tmp_path, model):
        for place in ("a.gguf", "b/Tiny-Q8_0.gguf", "c/Tiny-00001-of-00002.gguf", "c/Tiny-00002-of-00002.gguf"):
            (tmp_path / place).parent.mkdir(exist_ok=True)
            shutil.copy(model, tmp_path / place)
        hf_folder.write(tmp_path / "org" / "Qwen3-0.6B")
        revision = tmp_path / "models--org--Whisper-Tiny" / "snapshots" / ("0" * 40)
        hf_folder.write(revision, {"architectures": ["WhisperForConditionalGeneration"]})
        hf_folder.write(tmp_path / "pipe" / "text_encoder")
        (tmp_path / "pipe" / "model_index.json").write_text("{}")
        hf_folder.write(tmp_path / "odd", {"architectures": ["FooModel"]})
        cut = hf_folder.write(tmp_path / "cut") / "model.safetensors"
        cut.write_bytes(cut.read_bytes()[:-1])
        (tmp_path / "gguf-only").mkdir()
        (tmp_path / "gguf-only" / "config.json").write_text("{}")
        found, problems = find(tmp_path)
        taken: set[str] = set()
        for each in found:
            taken.add(each.name(taken))
        assert taken == {"tiny-chat", "tiny-chat-q8_0", "tiny", "whisper-tiny", "qwen3-0.6b", "pipe"}
        assert {one.path.name: one.about for one in found if one.about} == {
            "0" * 40: {"runtime": "transformers", "type": "asr"},
            "Qwen3-0.6B": {"runtime": "transformers"},
            "pipe": {"runtime": "diffusers"},
        }
        assert len(problems) == 2
        assert f"{tmp_path}/cut/model.safetensors is cut off" in problems[0] + problems[1]
        assert "names FooModel, which tells no runtime" in problems[0] + problems[1]

    def test_a_file_of_a_folder(self, tmp_path):
        folder = hf_folder.write(tmp_path / "Qwen3")
        with pytest.raises(NotFoundError, match=f"its folder is a model: {folder}"):
            find(folder / "model.safetensors")

    def test_links_and_what_can_not_be_read(self, tmp_path, model):
        (tmp_path / "a").mkdir()
        shutil.copy(model, tmp_path / "a" / "UPPER.GGUF")
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "top").mkdir()
        (tmp_path / "top" / "linked").symlink_to(tmp_path / "a")
        (only,), problems = find(tmp_path / "top")
        assert (only.path, problems) == (tmp_path / "top/linked/UPPER.GGUF", [])
        assert [one.path.name for one in find(tmp_path)[0]] == ["UPPER.GGUF"]
        assert only.names == ("tiny-chat", "upper")

    def test_files_that_go_meanwhile(self, tmp_path, model, monkeypatch):
        shutil.copy(model, tmp_path / "one.gguf")

        def gone(path: Path) -> str | None:
            raise FileNotFoundError(2, "No such file or directory", str(path))

        monkeypatch.setattr(gguf_meta, "cut_short", gone)
        assert find(tmp_path) == ([], [f"{tmp_path}/one.gguf: No such file or directory"])


class TestWhole:
    """To the byte."""

    def test_the_last_byte(self, tmp_path, model):
        content = model.read_bytes()
        file = tmp_path / "x.gguf"
        file.write_bytes(content)
        assert gguf_meta.cut_short(file) is None
        file.write_bytes(content[:-1])
        assert gguf_meta.cut_short(file) == (
            f"{file}: it is cut short: {len(content) - 1} bytes of at least {len(content)}; get it again"
        )

    def test_the_types(self):
        """gguf is llama.cpp's own package."""
        assert {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}.items() <= gguf_meta.BLOCKS.items()


class TestModelsFrom:
    """The key of the configuration."""

    def test_entries_and_names(self, tmp_path, model):
        shutil.copy(model, tmp_path / "one.gguf")
        shutil.copy(model, tmp_path / "two-Q8_0.gguf")
        (tmp_path / "half.gguf").write_bytes(model.read_bytes()[:-1])
        text = f"""
models_from: {tmp_path}
models:
  mine: {{path: {tmp_path}/one.gguf, n_ctx: 512}}
  tiny-chat: {{path: /elsewhere.gguf}}
virtual_models:
  tiny-chat-q8_0: {{model: tiny-chat-q8_0, defaults: {{temperature: 0}}}}
"""
        catalog = load_text(text, tmp_path / "llmux.yaml")
        assert list(catalog.models) == ["mine", "tiny-chat", "tiny-chat-q8_0"]
        assert catalog.models_from == (tmp_path,)
        assert catalog.unread[0].startswith(f"{tmp_path}/half.gguf: it is cut short")
        assert str(catalog.origin("models", "tiny-chat-q8_0", "path")) == str(tmp_path / "two-Q8_0.gguf")

    def test_a_name_stays_with_its_file(self, tmp_path, model):
        """Though the newcomer's path comes first."""
        text = f"models_from: {tmp_path}\n"

        def paths() -> dict[str, Path]:
            return {name: one.config.path for name, one in load_text(text, tmp_path / "llmux.yaml").models.items()}

        shutil.copy(model, tmp_path / "b-Q8_0.gguf")
        before = paths()
        shutil.copy(model, tmp_path / "a-Q8_0.gguf")
        assert paths() == {**before, "tiny-chat-q8_0": tmp_path / "a-Q8_0.gguf"}

    def test_one_whose_file_is_gone_stays_while_it_is_busy(self, tmp_path, model):
        """At each reload, until it is idle. What has an entry is the operator's to take out."""
        shutil.copy(model, tmp_path / "one.gguf")
        own = tmp_path / "models" / "two.gguf"
        own.parent.mkdir()
        shutil.copy(model, own)
        folder = f"models_from: {tmp_path}\n"
        running = load_text(f"{folder}models: {{own: {{path: {own}}}}}\n", tmp_path / "llmux.yaml")
        assert [running.is_local(one) for one in running.models.values()] == [False, True]
        (tmp_path / "one.gguf").unlink()
        own.unlink()
        after = load_text(f"{folder}models: {{cmd: {{cmd: [x]}}}}\n", tmp_path / "llmux.yaml")
        busy = frozenset(map(ModelId, ("own", "tiny-chat", "cmd")))
        for _ in range(2):
            running, leaving = _with_removed_busy(after, running, busy)
            assert (list(running.models), leaving) == (["cmd", "tiny-chat"], {"tiny-chat"})
        assert _with_removed_busy(after, running, frozenset()) == (after, frozenset())

    def test_a_folder_that_is_away(self, tmp_path):
        catalog = load_text(f"models_from: [{tmp_path}/gone]\n", tmp_path / "llmux.yaml")
        assert (dict(catalog.models), catalog.nothing_to_serve()) == ({}, None)
        assert catalog.unread == (f"{tmp_path}/gone: there is no such file or folder.",)

    @pytest.mark.parametrize("value", ["5", "{a: b}", "[[x]]"])
    def test_what_it_is_not(self, tmp_path, value):
        with pytest.raises(ConfigError, match="models_from"):
            load_text(f"models_from: {value}\n", tmp_path / "llmux.yaml")
