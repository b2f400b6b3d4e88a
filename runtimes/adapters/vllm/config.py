"""The configuration keys of every model on vLLM, however its engine is run, and the engine's settings that follow from them.

Settings have the names of vLLM's engine arguments (vllm/engine/arg_utils.py), which are also those of its command line
options. The keys for speculative decoding are passed together, as one object.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters.options import of_keys
from runtimes.adapters.server_program import FilePath, ServerConfig
from runtimes.model_config import ModelConfig

CacheType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
    "nvfp4_ds_mla",
]
CACHE_BYTES: Final = MappingProxyType(
    {"nvfp4": 0.5625, "nvfp4_4over6": 0.5625, "nvfp4_ds_mla": 0.5625, "int4_per_token_head": 0.5625}
    | {"float16": 2.0, "bfloat16": 2.0}
)
"""Bytes of a cached value by cache type; types that aren't listed take one byte, `auto` is the model's own type."""


SPECULATIVE: Final = MappingProxyType(
    {
        "speculative_method": "method",
        "speculative_model": "model",
        "speculative_moe_backend": "moe_backend",
        "speculative_attention_backend": "attention_backend",
        "num_speculative_tokens": "num_speculative_tokens",
    }
)
"""Key → its name in --speculative-config."""


class VllmConfig(ServerConfig):
    """A Hugging Face model on vLLM."""

    reserved = """
    --model --served-model-name --host --port --uds --api-key --root-path --config --hf-token --headless --grpc --grpc-port
    --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh --middleware
    --enable-sleep-mode --device-ids --nnodes -n --node-rank -r --master-addr --master-port --data-parallel-size -dp
    --data-parallel-rank -dpn --data-parallel-address -dpa --data-parallel-rpc-port -dpp --allowed-local-media-path
    --allowed-media-domains --pipeline-parallel-size -pp --enable-elastic-ep --distributed-executor-backend
    """  # they decide who reaches the worker, what it loads, where it runs, or what a request can make it read or fetch
    no_options = ("max_pixels", "speculative_models", *SPECULATIVE)
    renamed: ClassVar = {
        "enable_prefix_caching": ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    }
    former_keys: ClassVar = {
        **of_keys(("tokenizer", "enforce_eager")),
        "enable_chunked_prefill": ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    }
    spellings: ClassVar[Mapping[str, str]] = {
        "-q": "quantization",
        "-tp": "tensor_parallel_size",
        **dict.fromkeys(("-sc", "--speculative-config", "--spec-method"), "speculative_method"),
        "--spec-model": "speculative_model",
        "--spec-tokens": "num_speculative_tokens",
        "--device-memory-utilization": "gpu_memory_utilization",
        "--num-gpu-blocks-override": "kv_cache_memory_bytes",
        "--no-trust-remote-code": "trust_remote_code",
    }

    path: FilePath | None = Field(default=None, description="The model's folder.")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Instead of path: a Hugging Face name, taken from its cache or downloaded by vLLM at the first load.",
        examples=["Qwen/Qwen3-8B"],
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face name.")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        default="auto", description="Type of weights and activations; auto: the model's, float32 is halved."
    )
    quantization: str | None = Field(default=None, description="Quantisation method. Default: what the model says.")
    load_format: str | None = Field(default=None, description="How weights are read (auto, safetensors, dummy …).")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Context in tokens of one request. Default: up to 32768, as the device has room; more where half of a GPU stays free.",
    )
    max_num_seqs: int = Field(default=8, ge=1, le=4096, description="Requests generated at once.")
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Tokens computed in one step; decides what activations take."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        description="Size of the KV cache. Default: what vram_mib leaves for it, else enough for one longest request.",
    )
    kv_cache_dtype: CacheType = Field(default="auto", description="Type of the KV cache's values.")
    gpu_memory_utilization: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="Share of the device that must be free at the start. Sizes nothing: the KV cache is given in bytes.",
    )
    cpu_offload_gb: float = Field(default=0, ge=0, description="Weights kept in host memory, in GiB.")
    enable_prefix_caching: bool | None = Field(
        default=None, description="Keep beginnings of prompts in the KV cache. Default: where the model allows it."
    )
    tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Processes that share each layer, each on a GPU of its own. Default: `gpus`.",
    )
    limit_mm_per_prompt: dict[str, JsonValue] | None = Field(
        default=None, description="Most images, videos and sounds of one request, by kind."
    )
    mm_processor_kwargs: dict[str, JsonValue] | None = Field(
        default=None, description="Settings of the model's own processor of images and sounds."
    )
    max_pixels: int | None = Field(
        default=None, ge=1, description="Most pixels of an image; stands for mm_processor_kwargs.max_pixels."
    )
    chat_template: FilePath | None = Field(default=None, description="File with a chat template.")
    default_chat_template_kwargs: dict[str, JsonValue] | None = Field(
        default=None, description="Chat template arguments of requests that bring none."
    )
    speculative_method: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9_]+$",
        description="Kind of speculative decoding (mtp, eagle3, draft_model, ngram …). Default: none.",
    )
    speculative_model: str | None = Field(
        default=None, min_length=1, description="Folder or Hugging Face name of the draft or assistant model."
    )
    speculative_models: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Further draft models that a load may choose as its speculative_model."
    )
    speculative_moe_backend: str | None = Field(
        default=None, pattern=r"^[a-z0-9_]+$", description="How the draft computes its experts (triton, marlin …)."
    )
    speculative_attention_backend: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_]+$", description="How the draft computes attention (triton_attn …)."
    )
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=64, description="Tokens drafted at once.")
    extra_args: list[str] = Field(
        default_factory=list,
        description="Further options of vLLM's engine, as words of the command line of vllm serve.",
    )

    @property
    def processes(self) -> int:
        """Executors; each layer is divided among them."""
        return self.tensor_parallel_size or self.equal_gpus


CHAT: Final = frozenset({"chat_template", "default_chat_template_kwargs"})
"""The keys for the program that writes the prompts. The engine doesn't know them."""

_NO_SETTING: Final = frozenset({"path", "model", "max_pixels", "speculative_models", "extra_args", *SPECULATIVE, *CHAT})
SETTINGS: Final = frozenset(VllmConfig.model_fields.keys() - ModelConfig.model_fields.keys() - _NO_SETTING)
"""The keys that are engine arguments under their own names."""


def engine_settings(config: VllmConfig, *, context: int | None, cache_bytes: int) -> dict[str, JsonValue]:
    """The settings of an engine with this context and cache, without those that aren't set."""
    values: dict[str, JsonValue] = {
        **config.model_dump(mode="json", include=set(SETTINGS)),
        "max_model_len": context,
        "kv_cache_memory_bytes": cache_bytes,
        "kv_cache_dtype": config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None,
        "cpu_offload_gb": config.cpu_offload_gb or None,
        "tensor_parallel_size": config.processes if config.processes > 1 else None,
        "mm_processor_kwargs": _processor_settings(config),
        "speculative_config": speculative(config),
    }
    return {key: value for key, value in values.items() if value is not None}


def speculative(config: VllmConfig) -> dict[str, JsonValue] | None:
    """The engine's speculative_config; None without speculative decoding."""
    named = {name: getattr(config, key) for key, name in SPECULATIVE.items()}
    return {name: value for name, value in named.items() if value is not None} or None


def _processor_settings(config: VllmConfig) -> dict[str, JsonValue] | None:
    if config.max_pixels is None:
        return config.mm_processor_kwargs
    return {**(config.mm_processor_kwargs or {}), "max_pixels": config.max_pixels}
