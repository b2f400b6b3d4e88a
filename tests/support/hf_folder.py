"""Model folders in Hugging Face's layout, written with nothing but the standard library: a configuration and zeros."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 274,
}
TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{{ messages }}{% if enable_thinking %}<think>{% endif %}"


def safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int], int]], *, missing: int = 0) -> Path:
    """A file with these tensors: name → (type, shape, bytes). `missing` bytes are cut off its end."""
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (kind, shape, size) in tensors.items():
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + offset - missing)  # zeros that take no place on disk
    return path


def write(
    path: Path, config: Mapping[str, object] | None = None, *, size: int = 1 << 20, template: str | None = TEMPLATE
):
    """A folder with `size` bytes of bfloat16 weights; `config` is laid over that of a tiny Qwen3."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**TINY, **(config or {})}))
    safetensors(path / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [size // 2], size)})
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


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
