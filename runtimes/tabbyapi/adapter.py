"""Models in ExLlama's format (EXL3) on TabbyAPI, run from its checkout.

No registry has TabbyAPI: its own installation is a checkout with a virtual environment in its folder `venv`.

llmux sets the size of the cache (`cache_size`), so the footprint is known before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final

from pydantic import Field, JsonValue

from runtimes.adapters.checkpoints import Config
from runtimes.adapters.options import of_keys
from runtimes.adapters.server_program import FilePath, FolderServerAdapter, FolderServerConfig, endpoints
from runtimes.base import LaunchContext, ModelUnusableError
from runtimes.model_config import DividedConfig

STEP_TOKENS: Final = 2048  # of prompts, computed at once
CACHE_STEP: Final = 256  # the cache's size is a multiple of it
GIB: Final = 1024  # MiB
BITS: Final[Mapping[str, float]] = {"FP16": 16, "Q8": 8, "Q6": 6, "Q4": 4}


class TabbyConfig(DividedConfig, FolderServerConfig):
    """A model in ExLlama's format on TabbyAPI."""

    reserved = """
    --host --port --disable-auth --model-dir --model-name --inline-model-loading --tensor-parallel --gpu-split --gpu-split-auto
    --disable-fetch-requests --use-dummy-models --dummy-model-names --config --send-tracebacks --seqlog --seqlog-api-key
    """
    former_keys: ClassVar = {
        **of_keys(("chunk_size", "tool_format", "prompt_template")),
        "vision": ("--vision true", None),  # its switches have values
        "reasoning": ("--reasoning true", None),
    }
    spellings: ClassVar = {"--tensor-parallel": "gpus"}

    folder: FilePath = Field(description="TabbyAPI's checkout, with its main.py.", examples=["/opt/tabbyAPI"])
    python: FilePath | None = Field(
        default=None,
        description="Its interpreter. Default: venv/bin/python in the checkout, where its installer puts it.",
    )
    max_seq_len: int | None = Field(default=None, ge=1, description="Context in tokens. Default: at most 8192.")
    cache_size: int | None = Field(
        default=None,
        ge=CACHE_STEP,
        multiple_of=CACHE_STEP,
        description="Tokens in the KV cache, of all requests together. Default: max_seq_len.",
    )
    cache_mode: str = Field(
        default="FP16",
        pattern=r"^(FP16|Q8|Q6|Q4|[2-8],[2-8])$",
        description="Type of the KV cache's values: FP16, Q8, Q6, Q4, or bits of keys and values, as 8,4.",
        examples=["8,4"],
    )
    max_batch_size: int = Field(default=4, ge=1, le=256, description="Requests generated at once.")


class TabbyAdapter(FolderServerAdapter[TabbyConfig]):
    """TabbyAPI's server, one process."""

    name = "tabbyapi"
    summary = "Models in ExLlama's format (EXL3) on TabbyAPI, from its checkout."
    all_endpoints = endpoints("/v1/chat/completions", "/v1/completions", "/v1/token/encode", "/v1/token/decode")
    config = TabbyConfig
    spreads = True
    divides = True
    decoding: ClassVar = {**FolderServerAdapter.decoding, "typical_p": ("typical",)}
    program_key = "python"
    places = ("{config.folder}/venv/bin/python",)
    missing = "python: there is no {config.folder}/venv/bin/python; run TabbyAPI's start.sh once, or set python"
    starter = "runtimes.tabbyapi.worker"
    metrics = None
    context_key = "max_seq_len"
    requests_key = "max_batch_size"
    program_mib = 1200  # CUDA context and workspaces
    overridable_keys = ("max_seq_len", "cache_size", "cache_mode", "max_batch_size")

    def command_prefix(self, config: TabbyConfig, program: Path) -> tuple[str, ...]:
        """The launcher with the checkout, whose main.py it starts."""
        for problem in _folder_problems(config):
            raise ModelUnusableError(problem)
        return (*super().command_prefix(config, program), str(config.folder.absolute()))

    def settings(self, config: TabbyConfig, context: LaunchContext) -> dict[str, JsonValue]:
        """The values of TabbyAPI's options. Its switches take a value, so booleans become words."""
        several = len(context.devices) > 1
        parts: list[JsonValue] = [round(mib / GIB, 2) for mib in context.parts_mib]
        return {
            **super().settings(config, context),
            "model_dir": str(config.path.absolute().parent),
            "model_name": config.path.name,
            "max_seq_len": self.context(config),
            "cache_size": self.tokens(config),
            "chunk_size": STEP_TOKENS,
            "disable_fetch_requests": "true",  # a prompt makes it fetch nothing
            **({"gpu_split_auto": "false", "gpu_split": parts} if several and parts else {}),
            **({"tensor_parallel": "true"} if several and not parts else {}),
        }

    def tokens(self, config: TabbyConfig) -> int:
        """The size of the cache in tokens, rounded up to a size that TabbyAPI accepts."""
        return config.cache_size or -(-self.context(config) // CACHE_STEP) * CACHE_STEP

    def cache_width(self, config: TabbyConfig, model: Config) -> float:
        """Bytes by the bits of keys and values, with their scales."""
        keys, _, values = config.cache_mode.partition(",")
        bits = BITS.get(keys) or (int(keys) + int(values)) / 2
        return bits / 8 if bits == BITS["FP16"] else (bits + 0.5) / 8

    def upstream_model(self, config: TabbyConfig) -> str:
        """The name of the model's folder."""
        return config.path.name

    def problems(self, config: TabbyConfig) -> Iterator[str]:
        """Problems: no checkout or interpreter, a cache that is too small."""
        yield from super().problems(config)
        yield from self.program_problems(config)
        yield from _folder_problems(config)
        if config.cache_size is not None and config.cache_size < self.context(config):
            yield f"cache_size: must be at least max_seq_len, {self.context(config)}"


def _folder_problems(config: TabbyConfig) -> Iterator[str]:
    if not (config.folder / "main.py").is_file():
        yield f"folder: there is no main.py in {config.folder}; is it TabbyAPI's checkout?"
