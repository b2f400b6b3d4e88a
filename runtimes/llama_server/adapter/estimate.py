"""The memory of a llama.cpp server, computed from GGUF metadata: weights + KV cache + compute buffers + the program.

The terms follow llama.cpp (llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-hparams.cpp, graph_reserve):

- weights: the file, or the part of its layers that goes to the GPU.
- KV cache: for each attention layer `cells * kv_heads * (key_length * bytes(k) + value_length * bytes(v))`. All slots
  together have `n_ctx` cells. Layers with a sliding window have fewer cells; recurrent layers have a fixed state for
  each slot instead; latent attention (MLA) keeps no values.
- compute buffer: activations of one physical batch, its attention mask, without flash attention its scores too.

tests/e2e/runtimes compares the sum with the memory of real workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runtimes.estimate import MIB, Estimate
from runtimes.llama_server.adapter import gguf_meta
from runtimes.llama_server.adapter.config import SLOTS, LlamaServerConfig, layers, serves

CELL_STEP: Final = 256  # llama.cpp rounds the cells of a cache up to this
DEFAULT_UBATCH: Final = 512
PROGRAM_MIB: Final = (
    34  # the server without a model, libraries, threads, HTTP, tokenizer: 29 to 36; a binary takes 10 less
)

BYTES_PER_32: Final = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q5_1": 24,
    "q5_0": 22,
    "q4_1": 20,
    "q4_0": 18,
    "iq4_nl": 18,
}
"""Bytes of a block of 32 values in each cache type (ggml-common.h)."""

WINDOW_PERIOD: Final = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma-embedding": 6,
    "gpt-oss": 2,
    "llama4": 4,
    "cohere2": 4,
    "exaone4": 4,
    "olmo2": 4,
    "phi3": 1,
    "plamo3": 8,
    "smallthinker": 4,
}
"""Architectures whose every n-th layer sees the whole context although their files don't say so (1: none does)."""


def footprint(config: LlamaServerConfig) -> Estimate:
    """The footprint of a worker with this configuration. Raises ModelUnusableError if a file can't be read."""
    main = gguf_meta.read(config.path)
    parts = _model_parts(config, "model", main, layers(config.n_gpu_layers))
    if config.draft_model is not None:
        ngl = layers("all" if config.spec_draft_ngl is None else config.spec_draft_ngl)
        parts |= _model_parts(config, "draft", gguf_meta.read(config.draft_model), ngl)
    parts |= {
        "mmproj": _projector_bytes(config.mmproj) if config.mmproj else 0,
        "lora": sum(path.stat().st_size for path in config.lora if path.is_file()),
        "prompt cache": config.cache_ram_mib * MIB,
        "program": PROGRAM_MIB * config.equal_gpus * MIB,  # each GPU has its own, as it has of the buffers
    }
    context = _total_cells(config, main)
    buffers = sum(size for name, size in parts.items() if name.endswith(" compute"))
    slots = f"{_slots(config)} slot{'s' if _slots(config) > 1 else ''}"
    return Estimate.of(
        parts, f"{main.architecture}, {context} tokens of context, {slots}", each=buffers + PROGRAM_MIB * MIB
    )


def _total_cells(config: LlamaServerConfig, metadata: gguf_meta.Metadata) -> int:
    """Cells for the whole worker; a cache that isn't shared is cut into equal parts, each rounded up."""
    context = config.n_ctx or metadata.number("context_length", 4096)
    if config.kv_unified:
        return _round_up_cells(context)
    return _round_up_cells(-(-context // _slots(config))) * _slots(config)


def _slots(config: LlamaServerConfig) -> int:
    return config.parallel or SLOTS


def _round_up_cells(cells: int) -> int:
    return -(-cells // CELL_STEP) * CELL_STEP


def _model_parts(config: LlamaServerConfig, name: str, metadata: gguf_meta.Metadata, gpu_layers: int) -> dict[str, int]:
    count = metadata.layers
    weights, cache = metadata.file_bytes, _cache_bytes(config, metadata)
    if 0 < gpu_layers < count:  # the rest stays in host memory
        weights = weights * gpu_layers // (count + 1)
        cache = cache * gpu_layers // count
    compute = _compute_bytes(config, metadata) * config.equal_gpus
    return {f"{name} weights": weights, f"{name} KV cache": cache, f"{name} compute": compute}


def _cache_bytes(config: LlamaServerConfig, metadata: gguf_meta.Metadata) -> int:
    count = metadata.layers
    heads = metadata.number("attention.head_count", 1) or 1
    width = metadata.number("embedding_length")
    kv_heads = metadata.per_layer("attention.head_count_kv", count, heads)
    key_length = metadata.number("attention.key_length", width // heads)
    value_length = metadata.number("attention.value_length", width // heads)
    if metadata.number("attention.kv_lora_rank"):
        value_length = 0
    windowed = _windowed_layers(metadata, count)
    recurrent = _recurrent_layers(metadata, count)
    context = _total_cells(config, metadata)
    window = _window_cells(config, metadata, context)
    total = 0
    for layer in range(count):
        if layer in recurrent:
            total += _state_bytes(metadata) * _slots(config)
            continue
        cells = window if layer in windowed else context
        keys = kv_heads[layer] * key_length * BYTES_PER_32[config.cache_type_k] // 32
        values = kv_heads[layer] * value_length * BYTES_PER_32[config.cache_type_v] // 32
        total += cells * (keys + values)
    return total


def _windowed_layers(metadata: gguf_meta.Metadata, count: int) -> frozenset[int]:
    if not metadata.number("attention.sliding_window"):
        return frozenset()
    pattern = metadata.values.get(f"{metadata.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return frozenset(layer for layer, windowed in enumerate(pattern[:count]) if windowed)
    period = pattern if isinstance(pattern, int) else WINDOW_PERIOD.get(metadata.architecture, 0)
    if period == 0:
        return frozenset()
    return frozenset(layer for layer in range(count) if period == 1 or layer % period < period - 1)


def _window_cells(config: LlamaServerConfig, metadata: gguf_meta.Metadata, context: int) -> int:
    slots = _slots(config)
    window = metadata.number("attention.sliding_window")
    ubatch = config.ubatch_size or DEFAULT_UBATCH
    if config.kv_unified:
        return min(context, _round_up_cells(window * slots + ubatch))
    return min(context, _round_up_cells(window + ubatch) * slots)


def _recurrent_layers(metadata: gguf_meta.Metadata, count: int) -> frozenset[int]:
    """Layers without a KV cache: all but every n-th of a hybrid, or those a per-layer list gives no KV heads."""
    interval = metadata.number("full_attention_interval")
    if interval:
        return frozenset(layer for layer in range(count) if (layer + 1) % interval)
    if not metadata.number("ssm.state_size"):
        return frozenset()
    kv_heads = metadata.per_layer("attention.head_count_kv", count)
    return frozenset(layer for layer, heads in enumerate(kv_heads) if heads == 0)


def _state_bytes(metadata: gguf_meta.Metadata) -> int:
    """One slot's state of a recurrent layer, in f32 (llama_hparams::n_embd_r and n_embd_s)."""
    state, inner = metadata.number("ssm.state_size"), metadata.number("ssm.inner_size")
    convolution = max(metadata.number("ssm.conv_kernel") - 1, 0) * (
        inner + 2 * metadata.number("ssm.group_count") * state
    )
    return 4 * (convolution + state * inner)


def _compute_bytes(config: LlamaServerConfig, metadata: gguf_meta.Metadata) -> int:
    batch = config.ubatch_size or DEFAULT_UBATCH
    width = metadata.number("embedding_length")
    heads = metadata.number("attention.head_count", 1) or 1
    experts = max(metadata.number("expert_used_count"), 1)
    inner = max(
        metadata.number("feed_forward_length"),
        experts * metadata.number("expert_feed_forward_length"),
        metadata.number("ssm.inner_size") * 2,
    )
    attention = width + 2 * heads * metadata.number("attention.key_length", width // heads)
    outputs = batch if serves(config) != "text" else _slots(config)
    logits = 4 * outputs * (metadata.vocabulary if serves(config) == "text" else width)
    cells = _total_cells(config, metadata)
    flash = config.flash_attn != "off"
    mask = batch * cells * (2 if flash else 4)
    scores = 0 if flash else 4 * batch * cells * heads
    # one allocation is reused by all blocks: it holds the residual beside the larger of the two halves of a block
    return mask + 4 * batch * 4 * width + max(4 * batch * 3 * inner, 4 * batch * attention + scores) + logits


def _projector_bytes(path: Path) -> int:
    """A projector's weights, and as much again for the buffers of the images it encodes."""
    return 2 * gguf_meta.read(path).file_bytes
