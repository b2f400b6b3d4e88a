"""What every adapter of vLLM says: what it takes, how large its context is, and what the model's folder says it can do."""

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
"""By which a model's `env` may give its worker a hub, or another cache."""
OWN_VARIABLES: Final = {
    **dict.fromkeys(visibility_variables(), "is set by llmux"),
    "VLLM_CPU_KVCACHE_SPACE": "has a key of its own, kv_cache_memory_bytes",
}
"""Variables that aren't `env`'s to set, and why."""

C = TypeVar("C", bound=VllmConfig)


class VllmAdapter(Adapter[C]):
    """vLLM's engine, whoever runs it."""

    spreads = True
    media: ClassVar[tuple[Literal["image", "audio"], ...]] = ("image",)  # what its worker takes beside text
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
        """Files that are missing or unreadable, keys that contradict each other or the model."""
        yield from _file_problems(config)
        yield from _key_problems(config)

    def overridable(self, config: C) -> Mapping[str, Mapping[str, JsonValue]]:
        """The draft model, too: one of those that the file lists, and no other name or path."""
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
        """`max_model_len`; the cache has room for one request of so many tokens."""
        return memory.sized(config, room)

    def context_settings(self, config: C, tokens: int) -> Mapping[str, JsonValue]:
        """It has a key of its own."""
        return {"max_model_len": tokens}

    def inputs(self, config: C) -> frozenset[Modality] | None:
        """Text, and of `media` the kinds that the model takes; the configured modalities while its files are missing."""
        if (found := description(config)) is None:
            return super().inputs(config)
        takes, limits = {"image": found.takes_images, "audio": found.takes_audio}, config.limit_mm_per_prompt or {}
        return frozenset({"text", *(kind for kind in self.media if takes[kind] and limits.get(kind) != 0)})

    def gpus(self, config: C) -> int:
        """One for each process that shares the layers."""
        return config.processes

    def target_inflight(self, config: C) -> int:
        """As many as it generates concurrently."""
        return config.max_num_seqs if config.target_inflight is None else config.target_inflight

    def chat_template(self, config: C) -> str | None:
        """As configured, else the folder's."""
        return None if description(config) is None else template_of(config) or ""

    def memory_definition(self, config: C) -> str:
        """The configuration, and the plan that follows from the model's files and `vram_mib`."""
        try:
            return f"{super().memory_definition(config)} {memory.plan(config)}"
        except ModelUnusableError:
            return super().memory_definition(config)


def engine_environment(config: VllmConfig, devices: Iterable[DeviceAssignment]) -> dict[str, str]:
    """The variables that vLLM gets on these devices, unless `env` says otherwise. The daemon's own SAMPLER goes along."""
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
    """The chat template that prompts are made with; None without one."""
    if config.chat_template is not None:
        return config.chat_template.read_text(errors="replace") if config.chat_template.is_file() else None
    folder = memory.place(config)
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
    if draft is not None and is_offline and ((folder := memory.cached(draft)) is None or not folder.is_dir()):
        hub = f"isn't in {memory.hub()}, and this worker loads nothing from the hub; get it: hf download {draft}"
        yield f"speculative_model: {draft}: {'there is no such folder' if draft.startswith('/') else hub}"
    if config.chat_template is not None and not config.chat_template.is_file():
        yield f"chat_template: {config.chat_template}: there is no such file"


def _key_problems(config: VllmConfig) -> Iterator[str]:
    found = description(config)
    if found is not None and "image" in config.modalities and not found.takes_images:
        yield f"modalities: the model in {memory.place(config)} takes no images"
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
