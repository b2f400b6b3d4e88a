"""The memory of a vLLM worker, and the size of its KV cache.

vLLM takes its whole KV cache at the start: either a given number of bytes, or whatever is left of a share of the device.
llmux always gives bytes, so that the size is known before a device is chosen, and doesn't depend on other users of the
device:

1. `kv_cache_memory_bytes`, where it is configured;
2. else the rest of `vram_mib` after all other parts;
3. else room for one request of `max_model_len` tokens, which shorter ones share, and the fixed states of all.

The terms follow vLLM 0.32 (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, config/model.py): weights in the type
they are loaded in, the cache, the activations of one step of `max_num_batched_tokens`, and the program: its processes'
libraries on the host, or on a GPU the CUDA context, workspaces and graphs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import VALUE_BYTES, Config
from runtimes.adapters.kv_cache import LayerCache, activation_bytes, layer_caches
from runtimes.adapters.vllm.config import CACHE_BYTES, VllmConfig
from runtimes.base import ModelUnusableError
from runtimes.estimate import MIB, Estimate
from runtimes.sizing import ENOUGH, Room, Size, Sizing, choose, contexts

C = TypeVar("C", bound=VllmConfig)

GIB: Final = 1 << 30
PROGRAM_MIB: Final = 1600  # API server, engine core and one executor on the host, measured: 513, 477 and 610 MiB
PROCESS_MIB: Final = 610  # each further executor
USUAL_CONTEXT: Final = 8192  # unless configured, or chosen for a device
ROUNDING: Final = 1.1  # blocks are rounded up, and pages of unlike layers made equal
MIN_CACHE: Final = 16 * MIB
IMAGE_PIXELS: Final = 4_000_000  # of one image, where neither the configuration nor the model limits them

_ENCODERS: Final = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "distilbert", "mpnet", "new")


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """vLLM's memory settings. `terms`: the parts of the footprint, in bytes; empty if unknown."""

    context: int | None
    cache_bytes: int
    terms: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """All terms, in bytes."""
        return sum(size for _, size in self.terms)


def model_folder(config: VllmConfig) -> Path | None:
    """The model's folder; None for a Hugging Face name that isn't in the cache."""
    return config.path if config.path is not None else cached_folder(config.model or "", config.revision)


def description(config: VllmConfig) -> Config | None:
    """The model's config.json; None before the model was downloaded. Raises ModelUnusableError."""
    folder = model_folder(config)
    if folder is None:
        return None
    try:
        changed = (folder / "config.json").stat().st_mtime_ns
    except OSError:
        changed = 0
    return _cached_description(folder, changed)


@lru_cache(maxsize=64)
def _cached_description(folder: Path, _changed_ns: int) -> Config:
    return checkpoints.config(folder)


def hub_cache() -> Path:
    """Hugging Face's cache: `HF_HUB_CACHE`, `HF_HOME`."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def cached_folder(name: str, revision: str | None = None, place: Path | None = None) -> Path | None:
    """The folder of a model by its name in Hugging Face's cache, or in another cache at `place`; or the folder of this path."""
    if name.startswith("/"):
        return Path(name)
    model = (hub_cache() if place is None else place) / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision or ""
    folder = model / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def plan(config: VllmConfig) -> MemorySettings:
    """Context, cache and footprint. Blocks on reading files' heads. Raises ModelUnusableError, naming the key to set."""
    folder = model_folder(config)
    if folder is None:
        if config.kv_cache_memory_bytes is None:
            raise ModelUnusableError(
                f"kv_cache_memory_bytes: what {config.model} needs can't be computed before it was downloaded; set it"
            )
        return MemorySettings(config.max_model_len, config.kv_cache_memory_bytes)
    found = checkpoints.read(folder)
    tokens = context(config, found.config)
    processes = config.processes
    other_terms = [
        ("weights", max(found.weights.bytes_as(dtype(config, found.config)) - int(config.cpu_offload_gb * GIB), 0)),
        ("draft", _draft_bytes(config)),
        ("activations", _activation_bytes(config, found.config) * processes),
        ("program", (PROGRAM_MIB + (processes - 1) * PROCESS_MIB) * MIB),
    ]
    needed = cache_needed(config, found.config, tokens)
    cache = config.kv_cache_memory_bytes
    if cache is None and config.vram_mib is not None:
        cache = (config.vram_mib * MIB - sum(size for _, size in other_terms)) // processes
        if cache < needed:
            raise ModelUnusableError(
                f"vram_mib: {config.vram_mib} leaves {max(cache, 0) // MIB} MiB for the KV cache, but a request of {tokens} "
                f"tokens needs {-(-needed // MIB)}; raise it, or lower max_model_len"
            )
    cache = needed if cache is None else cache
    used = 0 if _needs_no_cache(found.config) else cache * processes
    terms = [other_terms[0], ("KV cache", used), *other_terms[1:]]
    return MemorySettings(tokens, cache, tuple((name, size) for name, size in terms if size))


def estimate(config: VllmConfig) -> Estimate | None:
    """The footprint; None if the model's files are missing."""
    try:
        found = plan(config)
    except ModelUnusableError:
        return None
    if not found.terms:
        return None
    note = f"{found.context} tokens of context, {config.max_num_seqs} requests at once"
    return Estimate.of(dict(found.terms), note)


def sized(config: C, room: Room | None) -> tuple[C, Sizing | None]:
    """See Adapter.sized. No reasons if the files are missing."""
    try:
        model = description(config)
    except ModelUnusableError:
        model = None
    if model is None or estimate(config.model_copy(update={"vram_mib": None})) is None:
        return config, None
    trained = model.context or 0
    if config.max_model_len is not None or room is None:
        why = "" if config.max_model_len is None else "as configured"
        return config, Sizing(context(config, model), config.max_num_seqs, trained, why)

    def footprint_mib(size: Size) -> int:
        found = estimate(config.model_copy(update={"max_model_len": size.context, "vram_mib": None}))
        assert found is not None, "the files were just read"
        return found.mib

    steps = contexts(trained or USUAL_CONTEXT)
    size, why = choose([Size(step, config.max_num_seqs, step > ENOUGH) for step in steps], room, footprint_mib)
    chosen = config.model_copy(update={"max_model_len": size.context})
    return chosen, Sizing(size.context, size.slots, trained, why)


def context(config: VllmConfig, model: Config) -> int:
    """Tokens of one request."""
    return config.max_model_len or min(model.context or USUAL_CONTEXT, USUAL_CONTEXT)


def dtype(config: VllmConfig, model: Config) -> str:
    """The type of the loaded weights, as vLLM chooses it."""
    if config.dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(config.dtype, config.dtype)
    return model.dtype if model.dtype in ("float16", "bfloat16") else "bfloat16"


def cache_needed(config: VllmConfig, model: Config, context: int) -> int:
    """Bytes for one request of `context` tokens, and the fixed states of all concurrent requests."""
    if _needs_no_cache(model):
        return MIN_CACHE
    width = CACHE_BYTES.get(config.kv_cache_dtype, 1.0)
    if config.kv_cache_dtype == "auto":
        width = VALUE_BYTES[dtype(config, model)]
    layers = layer_caches(model, value_bytes=width)
    longest = sum(_layer_bytes(layer, context, config) for layer in layers)
    return int(longest * ROUNDING / config.processes) + MIN_CACHE


def _layer_bytes(layer: LayerCache, context: int, config: VllmConfig) -> int:
    """Bytes of one layer's cache. A sliding window also holds the tokens of the current step."""
    tokens = context if layer.window is None else min(context, layer.window + config.max_num_batched_tokens)
    return layer.token * tokens + layer.state * config.max_num_seqs


def _needs_no_cache(model: Config) -> bool:
    """Does the model need no cache? Encoders read a text in one pass."""
    return model.model_type in _ENCODERS


def _draft_bytes(config: VllmConfig) -> int:
    """The draft model's weights; 0 for a draft within the model, or one that isn't downloaded yet."""
    if config.speculative_model is None:
        return 0
    folder = cached_folder(config.speculative_model)
    try:
        draft = checkpoints.read(folder) if folder is not None else None
    except ModelUnusableError:
        return 0
    return draft.weights.bytes_as(dtype(config, draft.config)) if draft is not None else 0


def _activation_bytes(config: VllmConfig, model: Config) -> int:
    width = VALUE_BYTES[dtype(config, model)]
    text = activation_bytes(model, tokens=config.max_num_batched_tokens, value_bytes=width, outputs=config.max_num_seqs)
    vision_values = model.values.get("vision_config")
    if not isinstance(vision_values, dict):
        return text
    vision = checkpoints.config_of(vision_values)
    patch = vision.number("patch_size", default=16) or 16
    patches = (config.max_pixels or IMAGE_PIXELS) // patch**2
    return text + activation_bytes(vision, tokens=patches, value_bytes=width)
