"""Hugging Face models on SGLang's own server, `sglang.launch_server`.

Which SGLang: that of the configured `python`, else of the runtime's own environment, else of the `sglang` program on PATH,
whose interpreter lies beside it. The server takes its key as an argument, so a few lines of ours start it in its own
interpreter (worker/__main__.py).

SGLang fills a share of what is free with its KV cache. Here it is told how many tokens the cache has to hold, so that it
takes the same whoever else is on the device:

1. `max_total_tokens`, where it is configured;
2. else what `vram_mib` leaves beside weights and program;
3. else one request of `context_length`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import Config
from runtimes.adapters.kv_cache import cache_bytes, layer_caches
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
from runtimes.base import Endpoint, HealthCheck, LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.estimate import MIB

NAME: Final = "model"  # in requests: a name with a colon would be one of an adapter (LoRA)
STEP: Final = 1024  # tokens

_TOKENS = endpoints("/tokenize", "/detokenize")
_TEXT = endpoints(
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/generate")
)
_VECTORS = endpoints("/v1/embeddings", "/v1/rerank", "/v1/score")


class SglangConfig(ServerProgramConfig):
    """A Hugging Face folder on SGLang."""

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
    mem_fraction_static: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Most that weights and cache may take of what is free. Default: as SGLang does.",
    )
    chunked_prefill_size: int = Field(
        default=2048, ge=-1, description="Tokens of a prompt computed in one step; -1: all of them."
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        default="auto", description="Type of weights and activations; auto: the model's, float32 is halved."
    )
    quantization: str | None = Field(default=None, description="Quantisation method. Default: what the model says.")
    kv_cache_dtype: Literal["auto", "fp8_e5m2", "fp8_e4m3"] = Field(
        default="auto", description="Type of the KV cache's values; auto: the model's."
    )
    attention_backend: str | None = Field(
        default=None, description="How attention is computed (flashinfer, triton …). Default: as SGLang chooses."
    )
    disable_cuda_graph: bool = Field(default=False, description="Starts sooner, runs slower, takes less.")
    reasoning_parser: str | None = Field(
        default=None, description="Takes thoughts out of the answer (qwen3, deepseek-r1, gpt-oss …)."
    )
    tool_call_parser: str | None = Field(
        default=None, description="Understands the model's tool calls (qwen25, qwen3_coder, gpt-oss …)."
    )
    chat_template: FilePath | None = Field(default=None, description="File with a chat template.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every option that has a key of its own."""
        return MappingProxyType(
            {option: key for key, option in _KEYS.items()}
            | {"--tp-size": "gpus", "--tensor-parallel-size": "gpus", "--is-embedding": "type"}
        )


_SWITCHES: Final = ("disable_cuda_graph", "trust_remote_code")
_KEYS: Final = of_keys(
    sorted(SglangConfig.model_fields.keys() - ServerProgramConfig.model_fields.keys() - {"python", *_SWITCHES})
)
FLAGS: Final[Options] = MappingProxyType(
    {
        **_KEYS,
        **of_keys(("model_path", "host", "port", "served_model_name", "tp_size", "device")),
        **{key: (option, None) for key, option in of_keys((*_SWITCHES, "is_embedding", "enable_metrics")).items()},
    }
)
_OWN: Final = """
--model-path --model --tokenizer-path --host --port --api-key --admin-api-key --served-model-name --tp-size
--tensor-parallel-size --is-embedding --enable-metrics --device --base-gpu-id --nnodes --node-rank --dist-init-addr --config
--ssl-keyfile --ssl-certfile --ssl-ca-certs --grpc-mode --smg-grpc-mode --grpc-port --use-ray --fastapi-root-path
--file-storage-path --log-requests --crash-dump-folder --dp-size --data-parallel-size
"""


class SglangAdapter(ServerProgramAdapter[SglangConfig]):
    """SGLang's server: HTTP, a scheduler for each GPU, a detokenizer."""

    name = "sglang"
    summary = "Hugging Face models on SGLang's own server: many requests at once, shared beginnings of prompts."
    all_endpoints = _TOKENS | _TEXT | _VECTORS
    config = SglangConfig
    requirements = Path(__file__).parent / "requirements.lock"
    spreads = True
    flags = FLAGS
    own_options = frozenset(_OWN.split())
    own_variables: ClassVar[Mapping[str, str]] = {KEY_VARIABLE: "is set by llmux"}
    health = HealthCheck("/health", then="/v1/models")
    program_mib = 2500  # context, workspaces and graphs of a GPU: an estimate until the worker was measured
    overridable_keys = ("context_length", "max_total_tokens", "max_running_requests", "chunked_prefill_size")

    def program(self, config: SglangConfig, context: LaunchContext) -> tuple[str, ...]:
        """SGLang's interpreter, and what starts the server in it."""
        return (str(self._python(config, context)), "-I", str(BOOTSTRAP), "runtimes.sglang.worker")

    def _python(self, config: SglangConfig, context: LaunchContext) -> Path:
        if config.python is not None:
            return runnable("python", config.python)
        own = context.environment(self.name) / "bin" / "python"
        if own.exists():
            return own
        beside = shutil.which("sglang")
        if beside is not None and (python := Path(beside).absolute().parent / "python").exists():
            return python
        raise RuntimeNotInstalledError(
            self.name,
            f"There is no SGLang in {own.parents[1]}, and no sglang program on PATH.",
            f"llmux runtimes install {self.name} --accelerator cuda; or set python to the interpreter of an environment with SGLang",
        )

    def settings(self, config: SglangConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Raises ModelUnusableError where vram_mib leaves no room for a request."""
        alone = context.device.kind.takes_whole
        return {
            "model_path": str(config.path),
            "served_model_name": NAME,
            "context_length": self.context(config),
            "max_total_tokens": self._cached(config),
            "dtype": config.dtype if config.dtype != "auto" else None,
            "kv_cache_dtype": config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None,
            "is_embedding": config.type == "embedding",
            "enable_metrics": True,
            "device": "cpu" if alone else context.device.kind.accelerator,
            "tp_size": config.equal_gpus if config.equal_gpus > 1 and not alone else None,
        }

    def secrets(self, context: LaunchContext) -> Mapping[str, str]:
        """For the lines that start the server."""
        return {KEY_VARIABLE: context.key}

    def endpoints(self, config: SglangConfig) -> frozenset[Endpoint]:
        """Of text, or of vectors: a worker does one of them."""
        return _TOKENS | (_VECTORS if config.type == "embedding" else _TEXT)

    def context(self, config: SglangConfig) -> int:
        """As configured, else usual."""
        return config.context_length or usual_context(config)

    def context_settings(self, config: SglangConfig, tokens: int) -> Mapping[str, JsonValue]:
        """It has a key of its own."""
        return {"context_length": tokens}

    def tokens(self, config: SglangConfig) -> int:
        """Those of the cache."""
        try:
            return self._cached(config)
        except ModelUnusableError:
            return self.context(config)

    def _cached(self, config: SglangConfig) -> int:
        """Raises ModelUnusableError where vram_mib leaves no room for a request, or the folder holds no model."""
        needed = self.context(config)
        if config.max_total_tokens is not None or config.vram_mib is None:
            return config.max_total_tokens or needed
        least = self.estimate(config.model_copy(update={"vram_mib": None, "max_total_tokens": needed}))
        if least is None:
            return needed
        layers = layer_caches(
            checkpoints.config(config.path), value_bytes=self.cache_width(config, checkpoints.config(config.path))
        )
        step = cache_bytes(layers, needed + STEP) - cache_bytes(layers, needed)
        spare = (config.vram_mib - least.mib) * MIB
        if spare < 0:
            raise ModelUnusableError(
                f"vram_mib: {config.vram_mib} is less than the {least.mib} MiB that a request of {needed} tokens needs "
                f"({least.detail}); raise it, or lower context_length"
            )
        return needed + (spare // step * STEP if step else 0)

    def cache_width(self, config: SglangConfig, model: Config) -> float:
        """One byte for the types of eight bits."""
        return 1.0 if config.kv_cache_dtype != "auto" else super().cache_width(config, model)

    def gpus(self, config: SglangConfig) -> int:
        """One for each process that shares the layers."""
        return config.equal_gpus

    def target_inflight(self, config: SglangConfig) -> int:
        """As many as it generates at once."""
        return config.max_running_requests if config.target_inflight is None else config.target_inflight

    def upstream_model(self, config: SglangConfig) -> str:
        """The same for every model."""
        return NAME

    def own_problems(self, config: SglangConfig) -> Iterator[str]:
        """A cache that is too small, a template that isn't there."""
        try:
            if self._cached(config) < self.context(config):
                yield f"max_total_tokens: must be at least context_length, {self.context(config)}"
        except ModelUnusableError as error:
            if not str(error).startswith(str(config.path)):
                yield str(error)
        if config.chat_template is not None and not config.chat_template.is_file():
            yield f"chat_template: {config.chat_template}: there is no such file"
