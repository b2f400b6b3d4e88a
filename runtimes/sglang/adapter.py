"""Hugging Face models on SGLang's own server, `sglang.launch_server`.

The server takes its key as an argument, so a few lines of ours start it in its own interpreter (worker/__main__.py).

SGLang would fill a share of the free memory with its KV cache. llmux sets the cache size in tokens instead, so that the
worker's memory doesn't depend on other users of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import Config
from runtimes.adapters.options import of_keys
from runtimes.adapters.server_program import FilePath, FolderServerAdapter, FolderServerConfig, endpoints
from runtimes.base import Endpoint, HealthCheck, LaunchContext, ModelUnusableError
from runtimes.estimate import MIB

STEP: Final = 1024  # tokens
STEP_TOKENS: Final = 2048  # of prompts, computed at once

_TOKENS = endpoints("/tokenize", "/detokenize")
_TEXT = endpoints("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/generate")
_VECTORS = endpoints("/v1/embeddings", "/v1/rerank", "/v1/score")


class SglangConfig(FolderServerConfig):
    """A Hugging Face folder on SGLang."""

    reserved = """
    --model-path --model --tokenizer-path --host --port --api-key --admin-api-key --served-model-name --tp-size
    --tensor-parallel-size --is-embedding --enable-metrics --device --base-gpu-id --nnodes --node-rank --dist-init-addr --config
    --ssl-keyfile --ssl-certfile --ssl-ca-certs --grpc-mode --smg-grpc-mode --grpc-port --use-ray --fastapi-root-path
    --file-storage-path --log-requests --crash-dump-folder --dp-size --data-parallel-size
    """
    former_keys: ClassVar = {
        **of_keys(("mem_fraction_static", "chunked_prefill_size", "attention_backend", "disable_cuda_graph")),
        **of_keys(("reasoning_parser", "tool_call_parser", "trust_remote_code", "chat_template")),
    }
    spellings: ClassVar = {"--tp-size": "gpus", "--tensor-parallel-size": "gpus", "--is-embedding": "type"}

    python: FilePath | None = Field(
        default=None,
        description="Interpreter of the environment that has SGLang. Default: the runtime's own environment, else that of the "
        "sglang program on PATH.",
        examples=["/opt/sglang/bin/python"],
    )
    context_length: int | None = Field(default=None, ge=1, description="Context in tokens. Default: at most 8192.")
    max_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in the KV cache, of all requests together. Default: what vram_mib leaves, else context_length.",
    )
    max_running_requests: int = Field(default=8, ge=1, le=4096, description="Requests generated at once.")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        default="auto", description="Type of weights and activations; auto: the model's, float32 is halved."
    )
    quantization: str | None = Field(default=None, description="Quantisation method. Default: what the model says.")
    kv_cache_dtype: Literal["auto", "fp8_e5m2", "fp8_e4m3"] = Field(
        default="auto", description="Type of the KV cache's values; auto: the model's."
    )


class SglangAdapter(FolderServerAdapter[SglangConfig]):
    """SGLang's server: HTTP, a scheduler for each GPU, a detokenizer."""

    name = "sglang"
    summary = "Hugging Face models on SGLang's own server: many requests at once, shared beginnings of prompts."
    all_endpoints = _TOKENS | _TEXT | _VECTORS
    config = SglangConfig
    requirements = Path(__file__).parent / "requirements.lock"
    spreads = True
    program_key = "python"
    places = ("{environment}/bin/python", "sglang")
    sibling_program = "python"
    missing = "There is no SGLang in {environment}, and no sglang program on PATH."
    remedy = "llmux runtimes install sglang --accelerator cuda; or set python to the interpreter of an environment with SGLang"
    starter = "runtimes.sglang.worker"
    health = HealthCheck("/health", then="/v1/models")
    served_name = "model"  # a name with a colon would be one of an adapter (LoRA)
    context_key = "context_length"
    requests_key = "max_running_requests"
    program_mib = 2500  # context, workspaces and graphs of a GPU
    overridable_keys = ("context_length", "max_total_tokens", "max_running_requests")

    def settings(self, config: SglangConfig, context: LaunchContext) -> dict[str, JsonValue]:
        """The values of SGLang's options. Raises ModelUnusableError if vram_mib leaves no room for a request."""
        return {
            **super().settings(config, context),
            "model_path": str(config.path),
            "served_model_name": self.served_name,
            "context_length": self.context(config),
            "chunked_prefill_size": STEP_TOKENS,
            "max_total_tokens": self._cache_tokens(config),
            "dtype": config.dtype if config.dtype != "auto" else None,
            "kv_cache_dtype": config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None,
            "is_embedding": config.type == "embedding",
            "enable_metrics": True,
            "device": "cpu" if context.device.kind.takes_whole else context.device.kind.accelerator,
            "tp_size": config.equal_gpus if config.equal_gpus > 1 else None,
        }

    def endpoints(self, config: SglangConfig) -> frozenset[Endpoint]:
        """The endpoints for text, or for vectors: a worker serves one kind."""
        return _TOKENS | (_VECTORS if config.type == "embedding" else _TEXT)

    def tokens(self, config: SglangConfig) -> int:
        """The size of the cache in tokens."""
        try:
            return self._cache_tokens(config)
        except ModelUnusableError:
            return self.context(config)

    def _cache_tokens(self, config: SglangConfig) -> int:
        """Sizes the cache. Raises ModelUnusableError if vram_mib leaves no room for a request."""
        needed = self.context(config)
        if config.max_total_tokens is not None or config.vram_mib is None:
            return config.max_total_tokens or needed
        least = self.estimate(config.model_copy(update={"vram_mib": None, "max_total_tokens": needed}))
        if least is None:
            return needed
        spare = (config.vram_mib - least.mib) * MIB
        if spare < 0:
            raise ModelUnusableError(
                f"vram_mib: {config.vram_mib} is less than the {least.mib} MiB that a request of {needed} tokens needs "
                f"({least.detail}); raise it, or lower context_length"
            )
        model = checkpoints.config(config.path)
        step = self.cache_bytes(config, model, needed + STEP) - self.cache_bytes(config, model, needed)
        return needed + (spare // step * STEP if step else 0)

    def cache_width(self, config: SglangConfig, model: Config) -> float:
        """One byte for 8-bit types, else the model's own width."""
        return 1.0 if config.kv_cache_dtype != "auto" else super().cache_width(config, model)

    def problems(self, config: SglangConfig) -> Iterator[str]:
        """The problem of a cache that is too small."""
        yield from super().problems(config)
        try:
            if self._cache_tokens(config) < self.context(config):
                yield f"max_total_tokens: must be at least context_length, {self.context(config)}"
        except ModelUnusableError as error:
            yield str(error)
