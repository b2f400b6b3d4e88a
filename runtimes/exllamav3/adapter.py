"""EXL3 models on ExLlamaV3: quantised language models, several requests in one batch, on NVIDIA GPUs alone.

Single turns of text. The cache is one for all requests, and as large as configured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import chat_workers, checkpoints
from runtimes.adapters.kv_cache import activation_bytes, cache_bytes, layer_caches
from runtimes.adapters.worker_adapter import ModelPath, ParallelConfig, WorkerAdapter
from runtimes.base import Capabilities, Contradiction, LaunchContext, ModelUnusableError, Thinking
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import DividedConfig, Modality

PAGE: Final = 256  # tokens; caches and chunks are whole pages
PROGRAM_MIB: Final = 700  # CUDA's context, torch and the library's kernels, with a margin: no GPU has measured it yet
SCALE_BITS: Final = 0.5  # of a quantised cache: a half float for 32 values

Bits = Annotated[int, Field(ge=2, le=8)]


class ExLlamaV3Config(DividedConfig, ParallelConfig):
    """An EXL3 model run by ExLlamaV3. `threads` has hardly any effect."""

    def says_where(self) -> bool:
        """Do ExLlamaV3's own keys divide the model among GPUs?"""
        return self.gpu_split is not None or self.tensor_parallel

    type: Literal["llm"] = Field(default="llm", description="What the model is for: texts.")
    modalities: list[Literal["text"]] = Field(  # type: ignore[assignment]  # narrower: there are no others
        default=["text"], description="What the model takes as input."
    )
    path: ModelPath = Field(description="The model's folder: config.json, safetensors in EXL3, tokenizer.json.")
    parallel: int = Field(default=4, ge=1, le=64, description="Requests the worker works on at once.")
    cache_size: int = Field(
        default=8192,
        ge=PAGE,
        multiple_of=PAGE,
        description="Tokens of the cache, which all requests share: the longest one has so much context.",
    )
    cache_quant: Bits | list[Bits] | None = Field(
        default=None,
        description="Bits of a value in the cache: one number, or two, of keys and of values. Default: 16, not quantised.",
        examples=[8],
    )
    gpu_split: list[Annotated[float, Field(ge=0)]] | None = Field(
        default=None,
        description="GiB to use of each of the worker's GPUs, in order. Default: as ExLlamaV3 divides it, or by `gpus: auto`.",
        examples=[[16, 24]],
    )
    tensor_parallel: bool = Field(
        default=False, description="Each layer on all of the worker's GPUs, instead of its own."
    )
    tp_backend: Literal["native", "nccl"] = Field(
        default="native", description="How the GPUs of `tensor_parallel` talk."
    )
    max_batch_size: int | None = Field(
        default=None, ge=1, description="Sequences generated at once. Default: `parallel`."
    )
    max_chunk_size: int = Field(
        default=2048, ge=PAGE, multiple_of=PAGE, description="Tokens of a prompt read in one step."
    )
    max_q_size: int = Field(
        default=8, ge=1, description="Tokens of a sequence evaluated at once while it is generated."
    )
    max_rq_tokens: int | None = Field(
        default=None,
        ge=PAGE,
        description="A request gives its place in the cache back after so many tokens, and waits for its turn. Default: never.",
    )


class ExLlamaV3Adapter(WorkerAdapter[ExLlamaV3Config]):
    """One process per model."""

    name = "exllamav3"
    summary = "EXL3 models on ExLlamaV3: single turns of text, on NVIDIA GPUs."
    all_endpoints = chat_workers.ENDPOINTS
    requirements = Path(__file__).parent / "requirements.lock"
    config = ExLlamaV3Config
    spreads = True
    divides = True
    overridable_keys = (
        *("cache_size", "cache_quant", "max_batch_size", "max_chunk_size", "max_q_size", "max_rq_tokens", "parallel"),
        "tensor_parallel",
    )
    program = "runtimes.exllamav3.worker"

    def problems(self, config: ExLlamaV3Config) -> Iterator[str]:
        """Problems: a folder without such a model, keys that contradict each other."""
        return _problems(config)

    def options(self, config: ExLlamaV3Config, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError without a model, or without an NVIDIA GPU."""
        if context.device.kind.accelerator != "cuda":
            raise ModelUnusableError(
                "ExLlamaV3 runs on NVIDIA GPUs alone. Set devices to one, or take the model's GGUF, with runtime llama_server"
            )
        folder = checkpoints.read(config.path)
        bits = config.cache_quant
        split: list[JsonValue] | None = None if config.gpu_split is None else [*config.gpu_split]
        if split is None and config.gpus == "auto" and len(context.devices) > 1:
            split = [mib / 1024 for mib in context.parts_mib]
        return {
            "path": str(config.path),
            "context": _context(config, folder),
            "cache_size": config.cache_size,
            "cache_quant": None if bits is None else [*_cache_bits(bits)],
            "use_per_device": split,
            "tensor_parallel": config.tensor_parallel,
            "tp_backend": config.tp_backend,
            "max_batch_size": config.max_batch_size or config.parallel,
            "max_chunk_size": config.max_chunk_size,
            "max_q_size": config.max_q_size,
            "max_rq_tokens": config.max_rq_tokens,
            "adds_bos": checkpoints.json_object(config.path / "tokenizer_config.json").get("add_bos_token") is True,
            "chat_template": checkpoints.chat_template(config.path) or "",
        }

    def estimate(self, config: ExLlamaV3Config) -> Estimate | None:
        """The stored weights, the cache, one chunk's activations and the program; None if the files don't suffice."""
        try:
            folder = checkpoints.read(config.path)
        except ModelUnusableError:
            return None
        keys, values = (16.0, 16.0) if config.cache_quant is None else _cache_bits(config.cache_quant)
        bits = (keys + values) / 2 + (0 if config.cache_quant is None else SCALE_BITS)
        layers = layer_caches(folder.config, value_bytes=bits / 8)
        activations = activation_bytes(folder.config, tokens=config.max_chunk_size, outputs=config.parallel)
        parts = {
            "weights": folder.weights.bytes_as(None),
            "KV cache": cache_bytes(layers, config.cache_size),
            "activations": activations * config.equal_gpus,
            "program": PROGRAM_MIB * MIB * config.equal_gpus,
        }
        note = f"{folder.config.model_type}, a cache of {config.cache_size} tokens"
        found = Estimate.of(parts, note, each=activations + PROGRAM_MIB * MIB)
        return found if folder.weights.lists_tensors else dataclasses.replace(found, source="file_size")

    def context_settings(self, config: ExLlamaV3Config, tokens: int) -> Mapping[str, JsonValue]:
        """The cache size, in whole pages."""
        return {"cache_size": -(-tokens // PAGE) * PAGE}

    def inputs(self, config: ExLlamaV3Config) -> frozenset[Modality]:
        """The model takes text only."""
        return frozenset({"text"})

    def capabilities(self, config: ExLlamaV3Config) -> Capabilities:
        """Single turns, without tools."""
        template = self.chat_template(config) or ""
        try:
            context = _context(config, checkpoints.read(config.path))
        except ModelUnusableError:
            return Capabilities(("text",), tools=False, multi_turn=False)
        return Capabilities(
            modalities=("text",),
            tools=False,
            thinking=chat_workers.thinks(template),
            multi_turn=False,
            context=context,
        )

    def chat_template(self, config: ExLlamaV3Config) -> str | None:
        """The chat template in the model's folder."""
        return checkpoints.template_in(config.path)

    def thinking(self, config: ExLlamaV3Config) -> Thinking | None:
        """Thinking is switched by an argument of the chat template, if the template has it."""
        return chat_workers.thinking(self.chat_template(config))


def _cache_bits(bits: int | list[int]) -> tuple[float, float]:
    """The bits of a cached key, and of a cached value."""
    return (bits, bits) if isinstance(bits, int) else (bits[0], bits[-1])


def _context(config: ExLlamaV3Config, folder: checkpoints.Folder) -> int:
    return min(config.cache_size, folder.config.context or config.cache_size)


def _problems(config: ExLlamaV3Config) -> Iterator[str]:
    try:
        folder = checkpoints.read(config.path)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    if folder.config.quantization not in (None, "exl3"):
        yield f"path: {config.path} is quantised by {folder.config.quantization}; ExLlamaV3 takes exl3, and plain weights"
    if not (config.path / "tokenizer.json").is_file():
        yield f"path: there is no tokenizer.json in {config.path}"
    if isinstance(config.cache_quant, list) and len(config.cache_quant) != 2:
        yield Contradiction("cache_quant: one number of bits, or two: of keys and of values")
    several = config.gpus == "auto" or config.equal_gpus > 1
    if config.tensor_parallel and not several:
        yield Contradiction("tensor_parallel: the worker has one GPU; set gpus")
    if config.gpu_split is not None:
        if config.gpus == "auto":
            yield Contradiction("gpus: auto, but gpu_split says what each GPU takes; remove one of the two")
        elif len(config.gpu_split) > config.equal_gpus:
            yield Contradiction(
                f"gpu_split: {len(config.gpu_split)} GPUs, and the worker has {config.equal_gpus}; set gpus"
            )
