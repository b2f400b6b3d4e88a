"""Language models on Hugging Face's Text Generation Inference: its own launcher, `text-generation-launcher`.

No registry that pip asks has the program: it comes in TGI's container image, or is built from its source.

TGI takes a share of its GPU (`--cuda-memory-fraction`), whatever the model needs, so `vram_mib` must contain the size of that
share. The launcher takes the key from the environment, but passes it to the router as an argument, which users of the same
machine can read. Vision models take pictures within texts, in Markdown's form `![](address)`, and TGI fetches that address. A
few lines of ours start TGI with its own folder for its sockets (worker/__main__.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters.options import of_keys
from runtimes.adapters.server_program import FilePath, FolderServerAdapter, FolderServerConfig, endpoints
from runtimes.adapters.worker_adapter import BOOTSTRAP
from runtimes.base import LaunchContext, TextReferences, Thinking

PROGRAM: Final = "text-generation-launcher"
SHARDS_PORT: Final = 10_000  # how far from the worker's port its shards meet
LARGEST_PORT: Final = 65_535
PROMPT_LIMITS: Final = frozenset({"--max-input-tokens", "--max-input-length"})


class TgiConfig(FolderServerConfig):
    """A Hugging Face folder on Text Generation Inference."""

    reserved = """
    --model-id --revision --hostname --port -p --prometheus-port --shard-uds-path --master-addr --master-port --num-shard
    --sharded --api-key --ngrok --ngrok-authtoken --ngrok-edge --cors-allow-origin --env -e --huggingface-hub-cache --usage-stats
    """
    former_keys = of_keys(
        (
            "max_batch_prefill_tokens",
            "max_batch_total_tokens",
            "quantize",
            "kv_cache_dtype",
            "speculate",
            "trust_remote_code",
            "max_input_tokens",
            "cuda_memory_fraction",
        )
    )
    renamed: ClassVar = {"host": "--hostname"}
    spellings: ClassVar = {"--num-shard": "gpus"}

    binary: FilePath | None = Field(default=None, description=f"The program. Default: {PROGRAM} on PATH.")
    max_total_tokens: int | None = Field(
        default=None, ge=2, description="Context in tokens of one request, prompt and answer together. Default: 8192."
    )
    max_concurrent_requests: int = Field(default=128, ge=1, description="Requests at once; TGI refuses more.")
    dtype: Literal["float16", "bfloat16"] | None = Field(
        default=None, description="Type of weights and activations. Default: as TGI chooses."
    )


class TgiAdapter(FolderServerAdapter[TgiConfig]):
    """TGI's launcher: a router, and a process for each GPU."""

    name = "tgi"
    summary = "Hugging Face models on Text Generation Inference, its own `text-generation-launcher`."
    all_endpoints = endpoints(
        *("/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize")
    )
    config = TgiConfig
    spreads = True
    decoding: ClassVar = {}  # OpenAI's alone
    places = (PROGRAM,)
    missing = (
        f"binary: {PROGRAM} is not on PATH, and pip can't install it; set binary to where it is, or run TGI's container with "
        "runtime command"
    )
    key_variable = "API_KEY"
    served_name = "tgi"  # any other name is one of an adapter (LoRA)
    context_key = "max_total_tokens"
    requests_key = "max_concurrent_requests"
    overridable_keys = ("max_total_tokens", "max_concurrent_requests")

    def command_prefix(self, config: TgiConfig, program: Path) -> tuple[str, ...]:
        """Our program that creates the folder, and the launcher."""
        return (sys.executable, "-IS", str(BOOTSTRAP), "runtimes.tgi.worker", str(program))

    def settings(self, config: TgiConfig, context: LaunchContext) -> dict[str, JsonValue]:
        """The values of TGI's options. Its parts get ports of their own: by default, two launchers would use the same ports."""
        shards = config.equal_gpus
        away = SHARDS_PORT if context.port + SHARDS_PORT <= LARGEST_PORT else -SHARDS_PORT
        return {
            **super().settings(config, context),
            "model_id": str(config.path),
            "max_total_tokens": self.context(config),
            **({} if _limits_prompts(config) else {"max_input_tokens": self.context(config) - 1}),
            "prometheus_port": 0,  # any free one: /metrics of the router has the same
            "usage_stats": "off",
            **({"num_shard": shards, "master_port": context.port + away} if shards > 1 else {}),
        }

    def thinking(self, config: TgiConfig) -> Thinking | None:
        """None: requests have no arguments for the chat template."""
        return None

    def text_references(self, config: TgiConfig) -> TextReferences | None:
        """Markdown pictures, unless the model is known to take no pictures."""
        inputs = self.inputs(config)
        return TextReferences("![](", ")") if inputs is None or "image" in inputs else None

    def answers_as(self, config: TgiConfig, model: str) -> str:
        """The folder, which is the model name in TGI's answers."""
        return str(config.path)

    def problems(self, config: TgiConfig) -> Iterator[str]:
        """The problem of a missing `vram_mib`, beside those of every folder."""
        yield from super().problems(config)
        if config.vram_mib is None:
            yield (
                "vram_mib: TGI takes its GPU, or the --cuda-memory-fraction of it in extra_args, whatever the model needs; "
                "say here how much that is"
            )


def _limits_prompts(config: TgiConfig) -> bool:
    """Does `extra_args` limit prompts? TGI refuses an option that is given twice."""
    return any(word.partition("=")[0] in PROMPT_LIMITS for word in config.extra_args)
