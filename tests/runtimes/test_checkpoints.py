from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import config_of
from runtimes.adapters.kv_cache import activation_bytes, cache_bytes, layer_caches
from runtimes.base import ModelUnusableError
from tests.hf_folder import safetensors

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "vocab_size": 151936,
}
QWEN3_5_TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 262144,
}


def token_bytes(layers):
    """What one more token takes within every window."""
    return sum(layer.token for layer in layers)


def folder(path: Path, config: dict[str, object] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(QWEN3_8B if config is None else config))
    return path


class TestWeights:
    """What the tensors take, in the files and once loaded in another type."""

    def test_one_file(self, tmp_path):
        safetensors(tmp_path / "model.safetensors", {"a": ("BF16", [4, 4], 32), "b": ("F32", [8], 32)})
        weights = checkpoints.weights(tmp_path)
        assert (weights.by_type, weights.tensors, weights.exact) == ({"BF16": 32, "F32": 32}, 2, True)
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
        assert not weights.exact
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
    """What a configuration says of the model."""

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


class TestCache:
    """What each kind of attention keeps, against figures worked out by hand from the papers' shapes."""

    def test_grouped_heads(self):
        layers = layer_caches(config_of(QWEN3_8B))
        assert token_bytes(layers) == 36 * 2 * 8 * 128 * 2
        assert cache_bytes(layers, 1000, 3) == 3000 * 147456
        assert token_bytes(layer_caches(config_of(QWEN3_8B), value_bytes=1)) == 147456 // 2

    def test_old_names(self):
        gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
        assert token_bytes(layer_caches(config_of(gpt2))) == 12 * 2 * 768 * 2
        falcon = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True}
        assert token_bytes(layer_caches(config_of(falcon))) == 32 * 2 * 64 * 2

    def test_windows_by_list(self):
        kinds = ["sliding_attention", "full_attention"] * 12
        config = config_of(
            {
                "hidden_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "sliding_window": 128,
                "layer_types": kinds,
            }
        )
        layers = layer_caches(config)
        assert cache_bytes(layers, 100) == 100 * 24 * 2 * 8 * 64 * 2
        assert cache_bytes(layers, 8192) == (12 * 128 + 12 * 8192) * 2 * 8 * 64 * 2

    @pytest.mark.parametrize(
        ("keys", "sliding"),
        [
            ({"model_type": "mistral"}, 12),
            ({"model_type": "gemma2"}, 6),
            ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, 10),
            ({"model_type": "gemma3_text"}, 10),
            ({"model_type": "qwen2", "use_sliding_window": False}, 0),
            ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, 8),
        ],
    )
    def test_windows_by_rule(self, keys, sliding):
        base = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "sliding_window": 32}
        layers = layer_caches(config_of({**base, **keys}))
        assert sum(layer.window == 32 for layer in layers) == sliding
        assert len(layers) == 12

    def test_linear_attention(self):
        layers = layer_caches(config_of({"text_config": QWEN3_5_TEXT}))
        state = (2 * 16 * 128 + 32 * 128) * 4 * 2 + 4 * 32 * 128 * 128
        assert token_bytes(layers) == 8 * 2 * 4 * 256 * 2
        assert cache_bytes(layers, 0) == 24 * state

    def test_linear_attention_by_interval(self):
        keys = {key: value for key, value in QWEN3_5_TEXT.items() if key != "layer_types"}
        layers = layer_caches(config_of({**keys, "full_attention_interval": 4}))
        assert layers == layer_caches(config_of(QWEN3_5_TEXT))

    def test_latent_attention(self):
        deepseek = {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
        assert token_bytes(layer_caches(config_of(deepseek))) == 61 * 576 * 2
        assert token_bytes(layer_caches(config_of(deepseek), latent=False)) == 61 * 128 * (192 + 128) * 2

    def test_full_layers_with_other_heads_and_shared_layers(self):
        gemma4 = {
            "hidden_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
        }
        layers = layer_caches(config_of(gemma4))
        assert [layer.token for layer in layers] == [2 * 2 * 256 * 2, 2 * 2 * 512 * 2] * 2

    def test_state_spaces(self):
        nemotron = {
            "hidden_size": 4480,
            "num_hidden_layers": 5,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hybrid_override_pattern": "M-M*-",
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        }
        layers = layer_caches(config_of(nemotron))
        state = (128 * 80 + 2 * 8 * 128) * 4 * 2 + 4 * 128 * 80 * 128
        assert (token_bytes(layers), cache_bytes(layers, 0, 2)) == (2 * 8 * 128 * 2, 2 * 2 * state)

    def test_of_an_encoder_decoder_what_the_encoder_made_stays(self):
        whisper = {"d_model": 384, "decoder_layers": 4, "decoder_attention_heads": 6, "max_source_positions": 1500}
        layers = layer_caches(config_of(whisper))
        assert cache_bytes(layers, 448) == 4 * (448 + 1500) * 2 * 384 * 2


class TestActivations:
    """A pass takes more with more tokens, wider values and more rows of logits."""

    def test_grows(self):
        config = config_of(QWEN3_8B)
        one = activation_bytes(config, tokens=2048)
        assert one == 2048 * 2 * (2 * 4096 + 3 * 12288) + 8 * 151936
        assert activation_bytes(config, tokens=4096) > one
        assert activation_bytes(config, tokens=2048, value_bytes=4) > one
        assert activation_bytes(config, tokens=2048, outputs=8) - one == 7 * 8 * 151936
