"""Models in ExLlama's format (EXL3) on TabbyAPI, run from its checkout.

No registry has TabbyAPI: its own installation is a checkout with a virtual environment in its folder `venv`. `folder` names
the checkout; `python` another interpreter than that of `venv`.

The cache is as large as it is told to be (`cache_size`), so the footprint is known before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

from pydantic import Field, JsonValue

from runtimes.adapters.checkpoints import Config
from runtimes.adapters.options import Options, of_keys
from runtimes.adapters.server_program import (
    FilePath,
    ServerProgramAdapter,
    ServerProgramConfig,
    endpoints,
    runnable,
    usual_context,
)
from runtimes.adapters.worker_adapter import BOOTSTRAP, KEY_VARIABLE
from runtimes.base import LaunchContext, ModelUnusableError
from runtimes.model_config import DividedConfig

CACHE_STEP: Final = 256  # the cache's size is a multiple of it
GIB: Final = 1024  # MiB
BITS: Final[Mapping[str, float]] = MappingProxyType({"FP16": 16, "Q8": 8, "Q6": 6, "Q4": 4})


class TabbyConfig(DividedConfig, ServerProgramConfig):
    """A model in ExLlama's format on TabbyAPI."""

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
    chunk_size: int = Field(default=2048, ge=1, description="Tokens of a prompt computed in one step.")
    max_batch_size: int = Field(default=4, ge=1, le=256, description="Requests generated at once.")
    vision: bool = Field(default=False, description="Load the model's eyes as well.")
    reasoning: bool = Field(default=False, description="Take thoughts in <think> tags out of the answer.")
    tool_format: str | None = Field(
        default=None, description="Understands the model's tool calls (qwen3_coder …). Default: it leaves them as text."
    )
    prompt_template: str | None = Field(
        default=None, description="Another chat template, by its name. Default: the model's."
    )

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every option that has a key of its own."""
        return MappingProxyType({option: key for key, option in _KEYS.items()} | {"--tensor-parallel": "gpus"})


_KEYS: Final = of_keys(
    sorted(TabbyConfig.model_fields.keys() - ServerProgramConfig.model_fields.keys() - {"folder", "python"})
)
FLAGS: Final[Options] = MappingProxyType(
    {
        **_KEYS,
        **of_keys(("host", "port", "model_dir", "model_name", "tensor_parallel", "gpu_split_auto", "gpu_split")),
        **of_keys(("disable_fetch_requests",)),
    }
)
_OWN: Final = """
--host --port --disable-auth --model-dir --model-name --inline-model-loading --tensor-parallel --gpu-split --gpu-split-auto
--disable-fetch-requests --use-dummy-models --dummy-model-names --config --send-tracebacks --seqlog --seqlog-api-key
"""


class TabbyAdapter(ServerProgramAdapter[TabbyConfig]):
    """TabbyAPI's server, one process."""

    name = "tabbyapi"
    summary = "Models in ExLlama's format (EXL3) on TabbyAPI, from its checkout."
    all_endpoints = endpoints("/v1/chat/completions", "/v1/completions", "/v1/token/encode", "/v1/token/decode")
    config = TabbyConfig
    spreads = True
    divides = True
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "top_k": ("top_k",),
        "min_p": ("min_p",),
        "typical_p": ("typical",),
        "repetition_penalty": ("repetition_penalty",),
    }
    flags = FLAGS
    own_options = frozenset(_OWN.split())
    own_variables: ClassVar[Mapping[str, str]] = {KEY_VARIABLE: "is set by llmux"}
    metrics = None
    program_mib = 1200  # CUDA context and workspaces: an estimate until the worker was measured
    overridable_keys = ("max_seq_len", "cache_size", "cache_mode", "chunk_size", "max_batch_size", "vision")

    def program(self, config: TabbyConfig, context: LaunchContext) -> tuple[str, ...]:
        """Its interpreter, and what starts the checkout's main.py in it."""
        python = _python(config)
        if not (config.folder / "main.py").is_file():
            raise ModelUnusableError(f"folder: there is no main.py in {config.folder}; is it TabbyAPI's checkout?")
        return (str(python), "-I", str(BOOTSTRAP), "runtimes.tabbyapi.worker", str(config.folder.absolute()))

    def settings(self, config: TabbyConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Switches are words here, as its arguments have values."""
        several = len(context.devices) > 1
        parts: list[JsonValue] = [round(mib / GIB, 2) for mib in context.parts_mib]
        return {
            "model_dir": str(config.path.absolute().parent),
            "model_name": config.path.name,
            "max_seq_len": self.context(config),
            "cache_size": self.tokens(config),
            "vision": "true" if config.vision else None,
            "reasoning": "true" if config.reasoning else None,
            "disable_fetch_requests": "true",  # a prompt makes it fetch nothing
            **({"gpu_split_auto": "false", "gpu_split": parts} if several and parts else {}),
            **({"tensor_parallel": "true"} if several and not parts else {}),
        }

    def secrets(self, context: LaunchContext) -> Mapping[str, str]:
        """For the lines that start the server."""
        return {KEY_VARIABLE: context.key}

    def context(self, config: TabbyConfig) -> int:
        """As configured, else usual."""
        return config.max_seq_len or usual_context(config)

    def context_settings(self, config: TabbyConfig, tokens: int) -> Mapping[str, JsonValue]:
        """It has a key of its own."""
        return {"max_seq_len": tokens}

    def tokens(self, config: TabbyConfig) -> int:
        """Those of the cache, rounded up to what it takes."""
        return config.cache_size or -(-self.context(config) // CACHE_STEP) * CACHE_STEP

    def cache_width(self, config: TabbyConfig, model: Config) -> float:
        """By the bits of keys and values, with their scales."""
        keys, _, values = config.cache_mode.partition(",")
        bits = BITS.get(keys) or (int(keys) + int(values)) / 2
        return bits / 8 if bits == BITS["FP16"] else (bits + 0.5) / 8

    def target_inflight(self, config: TabbyConfig) -> int:
        """As many as it generates at once."""
        return config.max_batch_size if config.target_inflight is None else config.target_inflight

    def upstream_model(self, config: TabbyConfig) -> str:
        """The folder's name."""
        return config.path.name

    def own_problems(self, config: TabbyConfig) -> Iterator[str]:
        """No checkout or interpreter, a cache that is too small."""
        try:
            _python(config)
        except ModelUnusableError as error:
            yield str(error)
        if not (config.folder / "main.py").is_file():
            yield f"folder: there is no main.py in {config.folder}; is it TabbyAPI's checkout?"
        if config.cache_size is not None and config.cache_size < self.context(config):
            yield f"cache_size: must be at least max_seq_len, {self.context(config)}"


def _python(config: TabbyConfig) -> Path:
    """Raises ModelUnusableError where there is none."""
    if config.python is not None:
        return runnable("python", config.python)
    own = config.folder / "venv" / "bin" / "python"
    if not own.exists():
        raise ModelUnusableError(f"python: there is no {own}; run TabbyAPI's start.sh once, or set python")
    return own.absolute()
