"""Real models and real llama.cpp programs for tests, made once per machine and kept in the user's cache.

`model(...)` is a scripted GGUF (see supervisor/cli/demo/tiny.py); `projector(...)` gives one eyes; `runtimes_dir()` holds the
embedded llama.cpp, installed when first asked for; `llama_server()` is a real binary, where tests/support/build_llama_server.py
has built one.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from functools import cache
from pathlib import Path

from supervisor.cli.demo import gguf, tiny
from tests.support import build_llama_server, environments

CACHE = build_llama_server.CACHE
ANSWER, THOUGHT, TOOL_CALL = tiny.ANSWER, tiny.THOUGHT, tiny.TOOL_CALL


@cache
def _sources() -> bytes:
    folder = Path(tiny.__file__).parent
    return b"".join(
        (folder / name).read_bytes() for name in ("gguf.py", "tiny.py", "chat_template.jinja", "merges.txt")
    )


def model(**parameters) -> Path:
    """A model file with these parameters of `Tiny`, e.g. `model(size_mib=100)`."""
    wanted = tiny.Tiny(**parameters)
    digest = hashlib.sha256(repr(wanted).encode() + _sources()).hexdigest()[:16]
    path = CACHE / "models" / f"{wanted.name}-{digest}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        tiny.write(aside, wanted)
        aside.rename(path)  # so that it is complete, whatever ends this program
    return path


def projector(text_dim: int = 256) -> Path:
    """A vision encoder of a few KiB that sees the same in every picture, for `mmproj`."""
    path = CACHE / "models" / f"projector-{text_dim}.gguf"
    if path.exists():
        return path
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
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    gguf.write(aside, keys, tensors)
    aside.rename(path)
    return path


@cache
def runtimes_dir() -> Path:
    """A folder with the embedded llama.cpp runtime, installed by the very code that users run."""
    return environments.installed("llama_server")


def llama_server() -> Path | None:
    """A real llama-server program; None where none was built."""
    return build_llama_server.find()
