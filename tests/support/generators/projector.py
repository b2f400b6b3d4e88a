"""A vision encoder of a few KiB, for llama.cpp, that sees the same in every picture. Imported, not run."""

from __future__ import annotations

from array import array
from pathlib import Path

from supervisor.cli.demo import gguf


def write(path: Path, text_dim: int) -> None:
    """The file; its vectors have `text_dim` values."""
    dim, inner, blocks, image, patch = 32, 64, 2, 56, 14
    keys = {
        "general.architecture": "clip",
        "general.name": "tiny-projector",
        "general.file_type": 0,
        "clip.has_vision_encoder": True,
        "clip.use_gelu": True,
        "clip.projector_type": "mlp",
        "clip.vision.image_size": image,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": dim,
        "clip.vision.feed_forward_length": inner,
        "clip.vision.block_count": blocks,
        "clip.vision.projection_dim": text_dim,
        "clip.vision.attention.head_count": 2,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    tensors = {
        "v.patch_embd.weight": gguf.Tensor((dim, 3, patch, patch)),
        "v.class_embd": gguf.Tensor((dim,), array("f", [0.5, -0.5] * (dim // 2))),
        "v.position_embd.weight": gguf.Tensor(((image // patch) ** 2 + 1, dim)),
    }

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = gguf.Tensor((rows, columns))
        tensors[f"{name}.bias"] = gguf.Tensor((rows,))

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = gguf.ones(dim)
        tensors[f"{name}.bias"] = gguf.Tensor((dim,))

    norm("v.pre_ln")
    for i in range(blocks):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"v.blk.{i}.{part}", dim, dim)
        norm(f"v.blk.{i}.ln1")
        norm(f"v.blk.{i}.ln2")
        linear(f"v.blk.{i}.ffn_up", inner, dim)
        linear(f"v.blk.{i}.ffn_down", dim, inner)
    linear("mm.0", text_dim, dim)
    linear("mm.2", text_dim, text_dim)
    gguf.write(path, keys, tensors)
