"""The base adapter of vLLM: memory, context size, and the abilities that the model's folder shows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, Literal, TypeVar

from pydantic import JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import Config
from runtimes.adapters.vllm import memory
from runtimes.adapters.vllm.config import SPECULATIVE, VllmConfig
from runtimes.base import Adapter, Contradiction, ModelUnusableError
from runtimes.device_kind import DeviceAssignment, visibility_variables
from runtimes.estimate import Estimate
from runtimes.model_config import Modality
from runtimes.sizing import Room, Sizing

BLACKWELL: Final = frozenset({10, 11, 12})  # majors of their compute capabilities: data centres, Thor, workstations
SAMPLER: Final = "VLLM_USE_FLASHINFER_SAMPLER"  # compiled on the spot, by a CUDA toolkit that must know the GPU
HUB: Final = frozenset({"HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE"})
"""Variables by which a model's `env` may let its worker use the hub, or another cache of the hub."""
OWN_VARIABLES: Final = {
    **dict.fromkeys(visibility_variables(), "is set by llmux"),
    "VLLM_CPU_KVCACHE_SPACE": "has a key of its own, kv_cache_memory_bytes",
}
"""Variable that `env` may not set → the reason."""

C = TypeVar("C", bound=VllmConfig)


class VllmAdapter(Adapter[C]):
    """The common part of both vLLM runtimes: vLLM's own server, and vLLM's engine in our worker."""

    spreads = True
    media: ClassVar[tuple[Literal["image", "audio"], ...]] = ("image",)  # the inputs of its worker beside text
    claims: ClassVar = {"cpu": ("vllm==0.32.0+cpu",)}  # the package is named vllm-cpu, but the program looks for vllm
    overridable_keys: ClassVar[tuple[str, ...]] = (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "max_pixels",
        "speculative_method",
        "speculative_moe_backend",
        "speculative_attention_backend",
        "num_speculative_tokens",
    )

    def problems(self, config: C) -> Iterator[str]:
        """Missing or unreadable files, and keys that contradict each other or the model."""
        yield from _file_problems(config)
        yield from _key_problems(config)

    def overridable(self, config: C) -> Mapping[str, Mapping[str, JsonValue]]:
        """Also the draft model: one of the names that the configuration file lists, and no other name or path."""
        own = () if config.speculative_model is None else (config.speculative_model,)
        listed: list[JsonValue] = [*dict.fromkeys((*own, *config.speculative_models))]
        offered = dict(super().overridable(config))
        if listed:
            offered["speculative_model"] = {"type": "string", "enum": listed}
        return offered

    def estimate(self, config: C) -> Estimate | None:
        """Weights, KV cache, activations, program; None if the model's files are missing."""
        return memory.estimate(config)

    def sized(self, config: C, room: Room | None) -> tuple[C, Sizing | None]:
        """Chooses `max_model_len`. The cache has room for one request of this many tokens."""
        return memory.sized(config, room)

    def context_settings(self, config: C, tokens: int) -> Mapping[str, JsonValue]:
        """The key `max_model_len`."""
        return {"max_model_len": tokens}

    def inputs(self, config: C) -> frozenset[Modality] | None:
        """Text, and the kinds of `media` that the model takes; while its files are missing, the configured modalities."""
        if (found := description(config)) is None:
            return super().inputs(config)
        takes, limits = {"image": found.takes_images, "audio": found.takes_audio}, config.limit_mm_per_prompt or {}
        return frozenset({"text", *(kind for kind in self.media if takes[kind] and limits.get(kind) != 0)})

    def gpus(self, config: C) -> int:
        """One GPU for each process that shares the layers."""
        return config.processes

    def target_inflight(self, config: C) -> int:
        """The number of sequences that the engine generates at once."""
        return config.max_num_seqs if config.target_inflight is None else config.target_inflight

    def chat_template(self, config: C) -> str | None:
        """The configured chat template, else the one in the model's folder."""
        return None if description(config) is None else template_of(config) or ""

    def memory_definition(self, config: C) -> str:
        """The configuration, and the memory plan that follows from the model's files and `vram_mib`."""
        try:
            return f"{super().memory_definition(config)} {memory.plan(config)}"
        except ModelUnusableError:
            return super().memory_definition(config)


def engine_environment(config: VllmConfig, devices: Iterable[DeviceAssignment]) -> dict[str, str]:
    """The variables of vLLM on these devices; `env` may override them. Includes SAMPLER from the daemon's environment."""
    blackwell = any(device.capability is not None and device.capability[0] in BLACKWELL for device in devices)
    sampler = os.environ.get(SAMPLER) or ("0" if blackwell else None)
    return {
        "VLLM_NO_USAGE_STATS": "1",
        **({"HF_HUB_OFFLINE": "1"} if config.path is not None else {}),
        **({SAMPLER: sampler} if sampler is not None else {}),
    }


def description(config: VllmConfig) -> Config | None:
    """The model's config.json; None where it is missing or unreadable."""
    try:
        return memory.description(config)
    except ModelUnusableError:
        return None


def template_of(config: VllmConfig) -> str | None:
    """The chat template that renders the prompts; None: there is none."""
    if config.chat_template is not None:
        return config.chat_template.read_text(errors="replace") if config.chat_template.is_file() else None
    folder = memory.model_folder(config)
    return checkpoints.chat_template(folder) if folder is not None else None


def _file_problems(config: VllmConfig) -> Iterator[str]:
    if (config.path is None) == (config.model is None):
        yield Contradiction("path: set it to the model's folder, or model to its Hugging Face name; one of the two")
        return
    if config.path is not None:
        try:
            checkpoints.read(config.path)
        except ModelUnusableError as error:
            yield f"path: {error}"
            return
    try:
        memory.plan(config)
    except ModelUnusableError as error:
        yield str(error)
    draft = config.speculative_model
    is_offline = config.path is not None and not HUB & config.env.keys()
    if draft is not None and is_offline and ((folder := memory.cached_folder(draft)) is None or not folder.is_dir()):
        hub = f"isn't in {memory.hub_cache()}, and this worker loads nothing from the hub; get it: hf download {draft}"
        yield f"speculative_model: {draft}: {'there is no such folder' if draft.startswith('/') else hub}"
    if config.chat_template is not None and not config.chat_template.is_file():
        yield f"chat_template: {config.chat_template}: there is no such file"


def _key_problems(config: VllmConfig) -> Iterator[str]:
    found = description(config)
    if found is not None and "image" in config.modalities and not found.takes_images:
        yield f"modalities: the model in {memory.model_folder(config)} takes no images"
    if (
        "gpu_memory_utilization" in config.model_fields_set
        and (config.kv_cache_memory_bytes or config.vram_mib) is None
    ):
        yield Contradiction(
            "gpu_memory_utilization: a share sizes no memory here; set kv_cache_memory_bytes, or vram_mib for all of it"
        )
    if config.tensor_parallel_size is not None and config.equal_gpus not in (1, config.tensor_parallel_size):
        yield Contradiction(
            f"gpus: {config.gpus}, but tensor_parallel_size is {config.tensor_parallel_size}; remove one of the two"
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        yield Contradiction(f"max_num_batched_tokens: must be at least max_num_seqs, {config.max_num_seqs}")
    if config.speculative_method is None and config.speculative_model is None:
        for key in SPECULATIVE:
            if getattr(config, key) is not None:
                yield Contradiction(f"{key}: needs speculative_method")
    if config.speculative_method == "draft_model" and config.speculative_model is None:
        yield Contradiction("speculative_method: draft_model needs speculative_model")
