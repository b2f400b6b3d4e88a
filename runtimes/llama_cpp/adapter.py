"""GGUF models on llama-cpp-python: llama.cpp as a library in the worker's own process, one request at a time, text only.

Metadata, context and memory are computed as for llama_server with one slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import chat_workers
from runtimes.adapters.worker_adapter import WorkerAdapter, WorkerConfig
from runtimes.base import Capabilities, Contradiction, LaunchContext, ModelUnusableError, Thinking
from runtimes.build import Build
from runtimes.estimate import Estimate
from runtimes.llama_server.adapter import estimate, gguf_meta, size
from runtimes.llama_server.adapter.builds import gpu_builds
from runtimes.llama_server.adapter.config import CacheType, FilePath, LlamaServerConfig, Switch
from runtimes.model_config import DividedConfig, Modality
from runtimes.prompt_cache import PromptCache
from runtimes.sizing import Room, Sizing

PYTHON_MIB: Final = 25  # Python, numpy and the HTTP server, in addition to a llama.cpp program
HALVES: Final = ("f32", "f16", "bf16")

ChatFormat = Literal[
    "alpaca",
    "baichuan",
    "baichuan-2",
    "chatglm3",
    "chatml",
    "gemma",
    "intel",
    "llama-2",
    "llama-3",
    "mistral-instruct",
    "mistrallite",
    "oasst_llama",
    "open-orca",
    "openbuddy",
    "openchat",
    "phind",
    "pygmalion",
    "qwen",
    "redpajama-incite",
    "saiga",
    "snoozy",
    "vicuna",
    "zephyr",
]


class LlamaCppConfig(DividedConfig, WorkerConfig):
    """A GGUF model run by llama-cpp-python."""

    removed_keys: ClassVar = {
        "parallel": "remove it: the library has one context, so this runtime works on one request at a time; llama_server has slots"
    }

    type: Literal["llm"] = Field(default="llm", description="What the model is for: texts.")
    modalities: list[Literal["text"]] = Field(  # type: ignore[assignment]  # narrower: there are no others
        default=["text"], description="What the model takes as input: for pictures use llama_server."
    )
    path: FilePath = Field(description="The GGUF file; of a split model its first part.")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads. Default: half of the cores for answers, all for prompts."
    )
    n_gpu_layers: Annotated[int, Field(ge=-1)] = Field(default=-1, description="Layers on the GPU; -1: all.")
    n_ctx: int | None = Field(
        default=None,
        ge=1,
        description="Context in tokens, prompt and answer. Default: up to 32768, as the device has room; more where half of a GPU stays free.",
    )
    flash_attn: Switch = Field(default="auto", description="Flash attention; auto: where the device has it.")
    type_k: CacheType = Field(default="f16", description="Type of the keys in the KV cache.")
    type_v: CacheType = Field(default="f16", description="Type of the values; a quantised one needs flash attention.")
    n_batch: int = Field(
        default=512, ge=1, description="Tokens of a prompt read at once; between them it can be cancelled."
    )
    chat_format: ChatFormat | None = Field(
        default=None,
        description="A chat format of llama-cpp-python by its name. Default: the file's chat template. See `prompt_format` for llmux's own.",
        examples=["chatml"],
    )


class LlamaCppAdapter(WorkerAdapter[LlamaCppConfig]):
    """One process per model."""

    name = "llama_cpp"
    converts_pictures = frozenset({"webp", "heic", "avif"})
    summary = "GGUF models on llama-cpp-python: llama.cpp in the worker's process, text only."
    all_endpoints = chat_workers.ENDPOINTS
    requirements = Path(__file__).parent / "requirements.lock"
    builds: ClassVar[Mapping[str, Build]] = gpu_builds("llama_cpp", options="-DLLAVA_BUILD=OFF")
    config = LlamaCppConfig
    spreads = True
    divides = True
    offload_key = "n_gpu_layers"
    overridable_keys = ("n_ctx", "n_gpu_layers", "flash_attn", "type_k", "type_v", "n_batch", "threads")
    program = "runtimes.llama_cpp.worker"

    def problems(self, config: LlamaCppConfig) -> Iterator[str]:
        """Problems: a file that is missing or not GGUF, keys that contradict each other."""
        return _problems(config)

    def options(self, config: LlamaCppConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError without a model."""
        on_gpu = context.device.kind.accelerates
        parts = context.parts_mib if config.gpus == "auto" else (1,) * len(context.devices)
        split: list[JsonValue] = [*map(float, parts)]
        return {
            "path": str(config.path),
            "n_gpu_layers": config.n_gpu_layers if on_gpu else 0,
            "n_ctx": _complete_server_config(config).n_ctx,
            "n_batch": config.n_batch,
            "flash_attn": config.flash_attn,
            "type_k": config.type_k,
            "type_v": config.type_v,
            "chat_format": config.chat_format,
            "threads": config.threads,
            "tensor_split": split if on_gpu and len(context.devices) > 1 else None,
        }

    def estimate(self, config: LlamaCppConfig) -> Estimate | None:
        """The footprint of llama_server with one slot, plus Python; None if the file is missing or not GGUF."""
        try:
            found = estimate.footprint(_complete_server_config(config))
        except ModelUnusableError:
            return None
        return dataclasses.replace(
            found, mib=found.mib + PYTHON_MIB, detail=f"{found.detail} + Python {PYTHON_MIB} MiB"
        )

    def sized(self, config: LlamaCppConfig, room: Room | None) -> tuple[LlamaCppConfig, Sizing | None]:
        """Chooses the context by the file's metadata."""
        server_room = None if room is None else dataclasses.replace(room, mib=max(0, room.mib - PYTHON_MIB))
        filled, why = size.sized(_server_config(config), server_room)
        return config.model_copy(update={"n_ctx": filled.n_ctx}), why

    def context_settings(self, config: LlamaCppConfig, tokens: int) -> Mapping[str, JsonValue]:
        """The key for the context."""
        return {"n_ctx": tokens}

    def weights(self, config: LlamaCppConfig) -> tuple[Path, ...]:
        """All files of the model, which may be split."""
        return gguf_meta.parts(config.path)

    def prompt_cache(self, config: LlamaCppConfig) -> PromptCache:
        """The library's one context holds the last prompt."""
        return PromptCache(is_kept=True, paths=chat_workers.ANSWERS, reuse_field="cache_prompt")

    def inputs(self, config: LlamaCppConfig) -> frozenset[Modality]:
        """The model takes text only."""
        return frozenset({"text"})

    def capabilities(self, config: LlamaCppConfig) -> Capabilities:
        """From the file's metadata, and words in its chat template."""
        try:
            metadata = gguf_meta.read(config.path)
        except ModelUnusableError:
            return Capabilities(("text",))
        template = self.chat_template(config) or ""
        return Capabilities(
            modalities=("text",),
            tools="tools" in template and chat_workers.writes_calls(template),
            thinking=chat_workers.thinks(template),
            multi_turn=bool(template) or config.chat_format is not None,
            context=_complete_server_config(config).n_ctx or metadata.number("context_length") or None,
            architecture=metadata.architecture or None,
        )

    def chat_template(self, config: LlamaCppConfig) -> str | None:
        """The chat template in the file, unless a chat format replaces it."""
        try:
            return "" if config.chat_format is not None else gguf_meta.chat_template(config.path) or ""
        except ModelUnusableError:
            return None

    def thinking(self, config: LlamaCppConfig) -> Thinking | None:
        """Thinking is switched by an argument of the chat template, if the template has it."""
        return chat_workers.thinking(self.chat_template(config))

    def memory_definition(self, config: LlamaCppConfig) -> str:
        """The configuration and the sizes of the files, because a replaced file needs different memory."""
        sizes = [part.stat().st_size for part in self.weights(config) if part.is_file()]
        return f"{super().memory_definition(config)} {sizes}"


def _problems(config: LlamaCppConfig) -> Iterator[str]:
    try:
        gguf_meta.read(config.path)
    except ModelUnusableError as error:
        yield f"path: {error}"
    if config.type_v not in HALVES and config.flash_attn == "off":
        yield Contradiction(f"type_v: {config.type_v} needs flash_attn on or auto")
    if config.chat_format is not None and config.prompt_format is not None:
        yield Contradiction("chat_format: prompt_format is set as well; keep one")


def _complete_server_config(config: LlamaCppConfig) -> LlamaServerConfig:
    """The llama_server configuration with the same footprint, without open values."""
    return size.complete(_server_config(config))


def _server_config(config: LlamaCppConfig) -> LlamaServerConfig:
    return LlamaServerConfig(
        runtime="llama_server",
        path=config.path,
        gpus=config.gpus,
        devices=config.devices,
        parallel=1,
        n_ctx=config.n_ctx,
        n_gpu_layers="all" if config.n_gpu_layers == -1 else config.n_gpu_layers,
        flash_attn=config.flash_attn,
        cache_type_k=config.type_k,
        cache_type_v=config.type_v,
        ubatch_size=config.n_batch,
        batch_size=config.n_batch,
        cache_ram_mib=0,
    )
