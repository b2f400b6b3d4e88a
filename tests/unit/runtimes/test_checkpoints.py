from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import config_of
from runtimes.base import ModelUnusableError
from tests.support.hf_folder import QWEN3_5_TEXT, QWEN3_8B, safetensors


def folder(path: Path, config: dict[str, object] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(QWEN3_8B if config is None else config))
    return path


class TestFolder:
    """A model's folder that can't be looked into."""

    def test_one_that_the_system_refuses(self):
        """As it would that of another user; this way, root as well."""
        with pytest.raises(ModelUnusableError, match=r"^/x+ can't be read: File name too long$"):
            checkpoints.read(Path("/" + "x" * 300))


class TestWeights:
    """What the tensors take, in the files and once loaded in another type."""

    def test_one_file(self, tmp_path):
        safetensors(tmp_path / "model.safetensors", {"a": ("BF16", [4, 4], 32), "b": ("F32", [8], 32)})
        weights = checkpoints.weights(tmp_path)
        assert (weights.by_type, weights.tensors, weights.lists_tensors) == ({"BF16": 32, "F32": 32}, 2, True)
        assert weights.bytes_as(None) == 64
        assert weights.bytes_as("bfloat16") == 48
        assert weights.bytes_as("float32") == 96

    def test_quantised_values_stay_as_they_are(self, tmp_path):
        tensors = {"packed": ("U8", [64], 64), "eight": ("F8_E4M3", [10], 10), "norm": ("BF16", [2], 4)}
        safetensors(tmp_path / "model.safetensors", tensors)
        assert checkpoints.weights(tmp_path).bytes_as("float32") == 64 + 10 + 8

    def test_the_index_says_which_files_count(self, tmp_path):
        safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F16", [10], 20)})
        safetensors(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F16", [20], 40)})
        safetensors(tmp_path / "consolidated.safetensors", {"a": ("F16", [30], 60)})
        safetensors(tmp_path / "other.safetensors", {"a": ("F16", [30], 60)})
        names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        assert checkpoints.weights(tmp_path).bytes_as(None) == 60

    def test_without_an_index_a_second_copy_does_not_count(self, tmp_path):
        safetensors(tmp_path / "model.safetensors", {"a": ("F16", [10], 20)})
        safetensors(tmp_path / "consolidated.safetensors", {"a": ("F16", [10], 20)})
        assert checkpoints.weights(tmp_path).bytes_as(None) == 20

    def test_files_of_pytorch_count_by_size(self, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
        weights = checkpoints.weights(tmp_path)
        assert not weights.lists_tensors
        assert weights.bytes_as("float32") == 100

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "not a safetensors file"),
            (b"GGUF\3\0\0\0" * 10, "not a safetensors file"),
            (struct.pack("<Q", 4) + b"[1]x", "not a safetensors file"),
            (struct.pack("<Q", 13) + b'{"a": [1, 2]}', "not a safetensors file"),
        ],
    )
    def test_something_else(self, tmp_path, content, said):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelUnusableError, match=said):
            checkpoints.weights(tmp_path)

    def test_a_file_that_is_cut_off(self, tmp_path):
        safetensors(tmp_path / "model.safetensors", {"a": ("F16", [10], 20)}, missing=1)
        with pytest.raises(ModelUnusableError, match="cut off"):
            checkpoints.weights(tmp_path)

    def test_a_shard_that_is_missing(self, tmp_path):
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
        with pytest.raises(ModelUnusableError, match=r"gone\.safetensors: there is no such file"):
            checkpoints.weights(tmp_path)

    def test_no_weights_at_all(self, tmp_path):
        with pytest.raises(ModelUnusableError, match="there are no weights"):
            checkpoints.weights(tmp_path)


class TestConfig:
    """Facts about a model from its config.json."""

    def test_of_a_text_model(self, tmp_path):
        config = checkpoints.config(folder(tmp_path))
        assert (config.model_type, config.architectures, config.dtype) == ("qwen3", ("Qwen3ForCausalLM",), "bfloat16")
        assert (config.context, config.layers, config.width, config.vocabulary) == (40960, 36, 4096, 151936)
        assert not config.takes_images
        assert not config.takes_audio
        assert config.quantization is None

    def test_of_a_model_with_eyes(self):
        config = config_of({"model_type": "qwen3_5", "text_config": QWEN3_5_TEXT, "vision_config": {"depth": 1}})
        assert config.takes_images
        assert config.context == 262144
        assert config.model_type == "qwen3_5"

    def test_of_a_model_with_ears(self):
        assert config_of({"model_type": "whisper", "num_mel_bins": 80}).takes_audio
        assert config_of({"audio_config": {}, "text_config": QWEN3_5_TEXT}).takes_audio

    def test_quantised(self):
        assert config_of({"quantization_config": {"quant_method": "mxfp4"}}).quantization == "mxfp4"
        assert config_of({"quantization_config": {"quant_algo": "NVFP4"}}).quantization == "NVFP4"

    @pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[]", "holds no JSON object")])
    def test_something_else(self, tmp_path, text, said):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelUnusableError, match=said):
            checkpoints.config(tmp_path)

    def test_not_a_model_folder(self, tmp_path):
        with pytest.raises(ModelUnusableError, match="can't be read"):
            checkpoints.config(tmp_path)
        with pytest.raises(ModelUnusableError, match="there is no such folder"):
            checkpoints.config(tmp_path / "gone")

    def test_chat_templates(self, tmp_path):
        safetensors(folder(tmp_path) / "model.safetensors", {"a": ("F16", [1], 2)})
        assert checkpoints.chat_template(tmp_path) is None
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert checkpoints.chat_template(tmp_path) == "D"
        (tmp_path / "chat_template.jinja").write_text("J")
        assert checkpoints.chat_template(tmp_path) == "J"
