"""What a language model's cache and activations take."""

from __future__ import annotations

from runtimes.adapters.checkpoints import config_of
from runtimes.adapters.kv_cache import activation_bytes, cache_bytes, layer_caches
from tests.support.cases import cases
from tests.support.hf_folder import QWEN3_5_TEXT, QWEN3_8B


def token_bytes(layers):
    """What one more token takes within every window."""
    return sum(layer.token for layer in layers)


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

    @cases(
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
