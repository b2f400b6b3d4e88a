"""The memory of a language model beside its weights: the cache of each layer, and activations. Computed from config.json.

A *layer cache* is the memory of one layer for a sequence: bytes for each token (perhaps only within a window), or a fixed
state. The formulas follow transformers' configuration classes and vLLM's KV cache specifications: grouped-query attention,
sliding windows, latent attention (MLA), and hybrids with linear attention or convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from runtimes.adapters.checkpoints import Config


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer for a sequence, in bytes: `token` for each (of the last `window`) token, `state` once."""

    token: int = 0
    window: int | None = None
    state: int = 0


def layer_caches(config: Config, *, value_bytes: float = 2, latent: bool = True) -> tuple[LayerCache, ...]:
    """The cache of each layer for a sequence during generation, with values of `value_bytes`.

    `latent`: models with latent attention (MLA) cache the latent vector, as vLLM does; False: its keys and values, as
    transformers does.
    """
    token, state = _token_bytes(config, value_bytes, latent=latent), _state_bytes(config, value_bytes)
    window = config.number("sliding_window", "attention_chunk_size") or None
    cross_attention = config.number("max_source_positions") * token if config.number("decoder_layers") else 0
    full_token = _full_attention_token_bytes(config, value_bytes) or token
    caches = []
    for kind in _layer_kinds(config):
        if kind == "full":
            caches.append(LayerCache(full_token, state=cross_attention))
        elif kind == "sliding":
            caches.append(LayerCache(token, window))
        elif kind == "linear":
            caches.append(LayerCache(state=state))
        elif kind == "both":
            caches.append(LayerCache(token, state=state))
    return tuple(caches[: len(caches) - config.number("num_kv_shared_layers")])


def cache_bytes(layers: Sequence[LayerCache], tokens: int, sequences: int = 1) -> int:
    """Bytes of the cache of all layers together, for `sequences` of `tokens` each."""
    return sequences * sum(
        layer.token * (tokens if layer.window is None else min(tokens, layer.window)) + layer.state for layer in layers
    )


def activation_bytes(config: Config, *, tokens: int, value_bytes: float = 2, outputs: int = 1) -> int:
    """Bytes that one pass over `tokens` needs beside weights and cache.

    The sum of the larger half of a layer, and `outputs` rows of logits.

    A layer holds the residual stream twice, beside either its attention (queries, keys, values, result) or its
    feed-forward part (both halves of the gate, and their product). Logits are in float32, and copied for sampling.
    """
    width = config.width
    experts = max(config.number("num_experts_per_tok", "moe_topk", "top_k_experts"), 1)
    inner = max(
        config.number("intermediate_size", "decoder_ffn_dim", "n_inner", "ffn_dim", default=4 * width),
        experts * config.number("moe_intermediate_size"),
    )
    attention = config.heads * _head_width(config) * 4
    return int(tokens * value_bytes * (2 * width + max(3 * inner, attention))) + 2 * 4 * outputs * config.vocabulary


def _head_width(config: Config) -> int:
    return config.number("head_dim", "d_kv", "attention_head_dim") or config.width // config.heads


def _kv_heads(config: Config) -> int:
    if config.text.get("multi_query") is True and not config.text.get("new_decoder_architecture"):
        return 1
    return config.number("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or config.heads


def _token_bytes(config: Config, value_bytes: float, *, latent: bool) -> int:
    if rank := config.number("kv_lora_rank"):
        rotary = config.number("qk_rope_head_dim")
        keys = config.number("qk_nope_head_dim") + rotary
        expanded = config.heads * (keys + config.number("v_head_dim"))
        return int((rank + rotary if latent else expanded) * value_bytes)
    width = _head_width(config)
    return int(_kv_heads(config) * (width + config.number("v_head_dim", default=width)) * value_bytes)


def _full_attention_token_bytes(config: Config, value_bytes: float) -> int | None:
    """Bytes per token in a full-attention layer, if its heads differ from those of windowed layers (Gemma 4); else None."""
    width = config.number("global_head_dim")
    if not width:
        return None
    heads = config.number("num_global_key_value_heads") if config.text.get("attention_k_eq_v") else 0
    return int(2 * width * (heads or _kv_heads(config)) * value_bytes)


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer: full, sliding, linear, both, or none (no cache)."""
    if pattern := config.text.get("hybrid_override_pattern"):
        return tuple({"M": "linear", "*": "full"}.get(letter, "none") for letter in str(pattern))
    count = config.layers
    listed = config.strings("layer_types") or config.strings("layers_block_type")
    if listed:
        return tuple(_layer_kind(name) for name in listed[:count])
    if interval := config.number("full_attention_interval"):
        return tuple("linear" if (layer + 1) % interval else "full" for layer in range(count))
    if config.number("mamba_d_state") and config.number("mamba_d_ssm"):
        return ("both",) * count
    if not config.number("sliding_window") or config.text.get("use_sliding_window") is False:
        return ("full",) * count
    if config.text.get("use_sliding_window"):
        first = config.number("max_window_layers")
        return tuple("sliding" if layer >= first else "full" for layer in range(count))
    period = config.number("sliding_window_pattern") or _PERIOD.get(str(config.text.get("model_type")), 0)
    if not period:
        return ("sliding",) * count
    return tuple("sliding" if (layer + 1) % period else "full" for layer in range(count))


_PERIOD: Final = MappingProxyType({"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "gpt_oss": 2})
"""Families whose every n-th layer has full attention although their older configurations don't say so."""


def _layer_kind(name: str) -> str:
    if name in ("sliding_attention", "chunked_attention", "local_attention"):
        return "sliding"
    if name in ("full_attention", "attention", "global_attention"):
        return "full"
    if name in ("moe", "mlp"):
        return "none"
    return "both" if name == "hybrid" else "linear"


def _state_bytes(config: Config, value_bytes: float) -> int:
    """A recurrent layer's state: the last inputs of its convolution, and a float32 matrix for each head."""
    if heads := config.number("linear_num_value_heads"):  # gated delta rule (Qwen3-Next, Qwen3.5)
        key_width, value_width = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
        channels = 2 * config.number("linear_num_key_heads") * key_width + heads * value_width
        inputs = channels * config.number("linear_conv_kernel_dim")
        return int(inputs * value_bytes) + 4 * heads * key_width * value_width
    if cells := config.number("mamba_d_state", "ssm_state_size", "state_size"):
        heads = config.number("mamba_n_heads", "mamba_num_heads")
        inner = config.number("mamba_d_ssm") or heads * config.number("mamba_d_head", "mamba_head_dim")
        inner = inner or config.width * config.number("mamba_expand", "expand", default=2)
        groups = config.number("mamba_n_groups", "n_groups") if heads else 0
        inputs = (inner + 2 * groups * cells) * config.number("mamba_d_conv", "conv_kernel", default=4)
        return int(inputs * value_bytes) + 4 * inner * cells
    if kernel := config.number("conv_L_cache"):  # convolutions only (LFM2)
        return int(config.width * kernel * value_bytes)
    return int(config.heads * _head_width(config) ** 2 * 4)  # linear attention (MiniMax)
