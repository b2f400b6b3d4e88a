"""Language models on Hugging Face's Text Generation Inference: its own launcher, `text-generation-launcher`.

No registry that pip asks has the program: it comes in TGI's container image, or is built from its source. Whichever is
configured as `binary`, or found on PATH, is run.

TGI takes a share of its GPU for itself (`cuda_memory_fraction`), whatever the model needs, so `vram_mib` must say how much
that is. Its launcher takes the key from the environment, but hands it on to its router as an argument, which users of the
same machine can read. Models that see take pictures in the midst of texts, as Markdown writes them, `![](address)`, and TGI
fetches what it finds there. A few lines of ours start it (worker/__main__.py), with a folder for its sockets that is its own.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters.options import Options, of_keys
from runtimes.adapters.server_program import (
    FilePath,
    ServerProgramAdapter,
    ServerProgramConfig,
    endpoints,
    runnable,
    usual_context,
)
from runtimes.adapters.worker_adapter import BOOTSTRAP
from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError, TextReferences, Thinking

PROGRAM: Final = "text-generation-launcher"
KEY_VARIABLE: Final = "API_KEY"
PICTURES: Final = TextReferences("![](", ")")
NAME: Final = "tgi"  # any other name in a request is one of an adapter (LoRA)
SHARDS_PORT: Final = 10_000  # how far from the worker's port its shards meet
LARGEST_PORT: Final = 65_535


class TgiConfig(ServerProgramConfig):
    """A Hugging Face folder on Text Generation Inference."""

    binary: FilePath | None = Field(default=None, description=f"The program. Default: {PROGRAM} on PATH.")
    max_total_tokens: int | None = Field(
        default=None, ge=2, description="Context in tokens of one request, prompt and answer together. Default: 8192."
    )
    max_input_tokens: int | None = Field(
        default=None, ge=1, description="Longest prompt, in tokens. Default: one less than max_total_tokens."
    )
    max_batch_prefill_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of prompts computed in one step. Default: as TGI chooses."
    )
    max_batch_total_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of all requests together. Default: as the GPU's share has room."
    )
    max_concurrent_requests: int = Field(default=128, ge=1, description="Requests at once; TGI refuses more.")
    quantize: str | None = Field(
        default=None, description="How weights are quantised (awq, gptq, fp8, bitsandbytes-nf4 …). Default: as stored."
    )
    dtype: Literal["float16", "bfloat16"] | None = Field(
        default=None, description="Type of weights and activations. Default: as TGI chooses."
    )
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = Field(
        default=None, description="Type of the KV cache's values. Default: that of the weights."
    )
    cuda_memory_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Share of its GPU that TGI takes; vram_mib says how much that is."
    )
    speculate: int | None = Field(default=None, ge=0, description="Tokens drafted at once. Default: as TGI chooses.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every option that has a key of its own."""
        return MappingProxyType({option: key for key, option in _KEYS.items()} | {"--num-shard": "gpus"})


_KEYS: Final = of_keys(
    sorted(TgiConfig.model_fields.keys() - ServerProgramConfig.model_fields.keys() - {"binary", "trust_remote_code"})
)
FLAGS: Final[Options] = MappingProxyType(
    {
        **_KEYS,
        **of_keys(("model_id", "port", "prometheus_port", "master_port", "num_shard", "usage_stats")),
        "host": "--hostname",
        "trust_remote_code": ("--trust-remote-code", None),
    }
)
_OWN: Final = """
--model-id --revision --hostname --port -p --prometheus-port --shard-uds-path --master-addr --master-port --num-shard --sharded
--api-key --ngrok --ngrok-authtoken --ngrok-edge --cors-allow-origin --env -e --huggingface-hub-cache --usage-stats
"""


class TgiAdapter(ServerProgramAdapter[TgiConfig]):
    """TGI's launcher: a router, and a process for each GPU."""

    name = "tgi"
    summary = "Hugging Face models on Text Generation Inference, its own `text-generation-launcher`."
    all_endpoints = endpoints(
        *("/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize")
    )
    config = TgiConfig
    spreads = True
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # OpenAI's alone
    flags = FLAGS
    own_options = frozenset(_OWN.split())
    own_variables: ClassVar[Mapping[str, str]] = {KEY_VARIABLE: "is set by llmux"}
    program_mib = 0
    overridable_keys = ("max_total_tokens", "max_input_tokens", "max_batch_prefill_tokens", "max_concurrent_requests")

    def program(self, config: TgiConfig, context: LaunchContext) -> tuple[str, ...]:
        """As configured, else on PATH."""
        if config.binary is not None:
            return (str(runnable("binary", config.binary)),)
        if (found := shutil.which(PROGRAM)) is None:
            raise ModelUnusableError(
                f"binary: {PROGRAM} is not on PATH, and pip can't install it; set binary to where it is, or run TGI's "
                "container with runtime command"
            )
        return (str(Path(found).absolute()),)

    def launch(self, config: TgiConfig, context: LaunchContext) -> LaunchSpec:
        """By the lines that give it a folder. Raises ModelUnusableError."""
        spec = super().launch(config, context)
        return replace(spec, argv=(sys.executable, "-IS", str(BOOTSTRAP), "runtimes.tgi.worker", *spec.argv))

    def settings(self, config: TgiConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Ports of its own parts; any two of its launchers would else meet at the same."""
        shards = 1 if context.device.kind.takes_whole else config.equal_gpus
        away = SHARDS_PORT if context.port + SHARDS_PORT <= LARGEST_PORT else -SHARDS_PORT
        return {
            "model_id": str(config.path),
            "max_total_tokens": self.context(config),
            "max_input_tokens": config.max_input_tokens or self.context(config) - 1,
            "prometheus_port": 0,  # any free one: /metrics of the router has the same
            "usage_stats": "off",
            **({"num_shard": shards, "master_port": context.port + away} if shards > 1 else {}),
        }

    def secrets(self, context: LaunchContext) -> Mapping[str, str]:
        """The key, under the name that clap gives its option."""
        return {KEY_VARIABLE: context.key}

    def tokens(self, config: TgiConfig) -> None:
        """TGI fills its share with the cache."""

    def context(self, config: TgiConfig) -> int:
        """As configured, else usual."""
        return config.max_total_tokens or usual_context(config)

    def context_settings(self, config: TgiConfig, tokens: int) -> Mapping[str, JsonValue]:
        """It has a key of its own."""
        return {"max_total_tokens": tokens}

    def target_inflight(self, config: TgiConfig) -> int:
        """As many as it takes."""
        return config.max_concurrent_requests if config.target_inflight is None else config.target_inflight

    def thinking(self, config: TgiConfig) -> Thinking | None:
        """Its requests have no arguments for the chat template."""
        return None

    def text_references(self, config: TgiConfig) -> TextReferences | None:
        """Pictures, unless the model is known to see none."""
        inputs = self.inputs(config)
        return PICTURES if inputs is None or "image" in inputs else None

    def upstream_model(self, config: TgiConfig) -> str:
        """The one name that means the model itself."""
        return NAME

    def answers_as(self, config: TgiConfig, model: str) -> str:
        """Its answers name the folder."""
        return str(config.path)

    def own_problems(self, config: TgiConfig) -> Iterator[str]:
        """No known footprint, contradicting lengths."""
        if config.vram_mib is None:
            yield (
                "vram_mib: TGI takes cuda_memory_fraction of its GPU, whatever the model needs; say here how much that is"
            )
        if config.max_input_tokens is not None and config.max_input_tokens >= self.context(config):
            yield f"max_input_tokens: must be less than max_total_tokens, {self.context(config)}"
