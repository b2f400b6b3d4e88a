"""The configuration keys of a vllm_serve model, and the option of each key of `vllm serve`.

`FLAGS` has the option of each key; the keys for speculative decoding are passed together, as the JSON of
`--speculative-config`. Other options go into `extra_args`, except those that llmux sets or that have a key. argparse also
accepts abbreviated options, underscores and `--option.key`, so these are checked too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters.options import Options, keys_of, of_keys
from runtimes.model_config import ModelConfig

FilePath = Annotated[Path, Field(strict=False)]
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


class VllmServeConfig(ModelConfig):
    """A Hugging Face model served by vLLM's own server."""

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every spelling of an option that has a key of its own."""
        return KEY_OF_OPTION

    path: FilePath | None = Field(default=None, description="The model's folder.")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Instead of path: a Hugging Face name, taken from its cache or downloaded by vLLM at the first load.",
        examples=["Qwen/Qwen3-8B"],
    )
    binary: FilePath | None = Field(
        default=None, description="The vllm program. Default: the runtime's own environment, else found on PATH."
    )
    library_path: list[FilePath] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH, for builds with their own CUDA."
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Model name the worker reports. Default: the model's name."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face name.")
    tokenizer: str | None = Field(default=None, description="Folder or name of another tokenizer.")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        default="auto", description="Type of weights and activations; auto: the model's, float32 is halved."
    )
    quantization: str | None = Field(default=None, description="Quantisation method. Default: what the model says.")
    load_format: str | None = Field(default=None, description="How weights are read (auto, safetensors, dummy …).")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    runner: Literal["auto", "generate", "pooling"] = Field(
        default="auto",
        description="Generate text, or pool to embeddings, classes or scores; auto: as the model is made.",
    )
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
    enforce_eager: bool = Field(
        default=False, description="No compilation, no CUDA graphs: starts sooner, runs slower, takes less."
    )
    enable_prefix_caching: bool | None = Field(
        default=None, description="Keep beginnings of prompts in the KV cache. Default: where the model allows it."
    )
    enable_chunked_prefill: bool | None = Field(
        default=None, description="Compute long prompts in pieces. Default: where the model allows it."
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
    reasoning_parser: str | None = Field(
        default=None, description="Takes thoughts out of the answer (qwen3, deepseek_r1, openai_gptoss …)."
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="Understands the model's tool calls (hermes, qwen3_coder, openai …); switches them on.",
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
    extra_args: list[str] = Field(default_factory=list, description="Further command line options of vllm serve.")

    @property
    def processes(self) -> int:
        """Executors; each layer is divided among them."""
        return self.tensor_parallel_size or self.equal_gpus


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

_NO_OPTION = {"path", "model", "binary", "library_path", "max_pixels", "speculative_models", "extra_args", *SPECULATIVE}
_KEYS = VllmServeConfig.model_fields.keys() - ModelConfig.model_fields.keys() - _NO_OPTION

FLAGS: Options = MappingProxyType(
    {
        **of_keys(sorted(_KEYS | {"host", "port", "speculative_config", "allowed_media_domains"})),
        "trust_remote_code": ("--trust-remote-code", None),
        "enforce_eager": ("--enforce-eager", None),
        "enable_prefix_caching": ("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "enable_chunked_prefill": ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        "enable_auto_tool_choice": ("--enable-auto-tool-choice", None),
    }
)

_OWN_OPTIONS = """
--model --host --port --uds --api-key --root-path --config --hf-token --headless --grpc --grpc-port --ssl-keyfile
--ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh --middleware --enable-sleep-mode
--device-ids --nnodes -n --node-rank -r --master-addr --master-port --data-parallel-size -dp --data-parallel-rank -dpn
--data-parallel-address -dpa --data-parallel-rpc-port -dpp --allowed-local-media-path --allowed-media-domains
--pipeline-parallel-size -pp --enable-elastic-ep --distributed-executor-backend
"""
OWN_OPTIONS: Final = frozenset(_OWN_OPTIONS.split())
"""Options that decide who reaches the worker, what it loads, where it runs, or what a request can make it read or fetch."""

_OTHER_SPELLINGS: Final = {
    "-q": "quantization",
    "-tp": "tensor_parallel_size",
    "-sc": "speculative_method",
    "--speculative-config": "speculative_method",
    "--spec-method": "speculative_method",
    "--spec-model": "speculative_model",
    "--spec-tokens": "num_speculative_tokens",
    "--device-memory-utilization": "gpu_memory_utilization",
    "--num-gpu-blocks-override": "kv_cache_memory_bytes",
    "--no-trust-remote-code": "trust_remote_code",
    "--no-enforce-eager": "enforce_eager",
    "--enable-auto-tool-choice": "tool_call_parser",
    "--no-enable-auto-tool-choice": "tool_call_parser",
}

KEY_OF_OPTION: Final = MappingProxyType(
    {option: key for option, key in keys_of(FLAGS).items() if option not in OWN_OPTIONS} | _OTHER_SPELLINGS
)
"""Every spelling of an option that has a key of its own."""


def refused_options(words: list[str]) -> Iterator[str]:
    """Which of these words are options that aren't `extra_args`' to set, each a sentence."""
    for word in words:
        if not word.startswith("-") or word[1:2].isdigit():
            continue
        option = word.partition("=")[0].partition(".")[0]
        if option.startswith("--"):
            option = option.replace("_", "-")
        meant = _meant(option)
        if meant in OWN_OPTIONS:
            yield f"{option} is set by llmux"
        elif (key := KEY_OF_OPTION.get(meant)) is not None:
            yield f"{option} has a key of its own, {key}"


def _meant(option: str) -> str:
    """The option that argparse takes this for: itself, or the one it is the beginning of."""
    known = sorted(OWN_OPTIONS | KEY_OF_OPTION.keys())
    if option in known or not option.startswith("--"):
        return option
    return next((name for name in known if name.startswith(option)), option)


def settings(config: VllmServeConfig, *, context: int | None, cache_bytes: int) -> dict[str, JsonValue]:
    """The settings of a worker with this context and cache. Address and name are the launch's, and not in here."""
    values: dict[str, JsonValue] = {
        **config.model_dump(mode="json", include=set(FLAGS)),
        "max_model_len": context,
        "kv_cache_memory_bytes": cache_bytes,
        "kv_cache_dtype": config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None,
        "runner": config.runner if config.runner != "auto" else None,
        "cpu_offload_gb": config.cpu_offload_gb or None,
        "tensor_parallel_size": config.processes if config.processes > 1 else None,
        "mm_processor_kwargs": _processor(config),
        "enable_auto_tool_choice": True if config.tool_call_parser else None,
        "speculative_config": speculative(config),
    }
    return {key: value for key, value in values.items() if value is not None}


def speculative(config: VllmServeConfig) -> dict[str, JsonValue] | None:
    """The value of --speculative-config; None without speculative decoding."""
    named = {name: getattr(config, key) for key, name in SPECULATIVE.items()}
    return {name: value for name, value in named.items() if value is not None} or None


def _processor(config: VllmServeConfig) -> dict[str, JsonValue] | None:
    if config.max_pixels is None:
        return config.mm_processor_kwargs
    return {**(config.mm_processor_kwargs or {}), "max_pixels": config.max_pixels}
