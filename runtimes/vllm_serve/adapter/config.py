"""The configuration keys of a vllm_serve model beside those of every model on vLLM, and the option of each key of `vllm serve`.

`FLAGS` has the option of each key. Other options go into `extra_args`, except those that llmux sets or that have a key.
argparse also accepts abbreviated options, underscores and `--option.key`, so these are checked too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import options
from runtimes.adapters.options import Options, keys_of, of_keys
from runtimes.adapters.vllm.config import CHAT, SETTINGS, FilePath, VllmConfig, engine_settings


class VllmServeConfig(VllmConfig):
    """A Hugging Face model served by vLLM's own server."""

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every spelling of an option that has a key of its own."""
        return KEY_OF_OPTION

    binary: FilePath | None = Field(
        default=None, description="The vllm program. Default: the runtime's own environment, else found on PATH."
    )
    library_path: list[FilePath] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH, for builds with their own CUDA."
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Model name the worker reports. Default: the model's name."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        default="auto",
        description="Generate text, or pool to embeddings, classes or scores; auto: as the model is made.",
    )
    reasoning_parser: str | None = Field(
        default=None, description="Takes thoughts out of the answer (qwen3, deepseek_r1, openai_gptoss …)."
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="Understands the model's tool calls (hermes, qwen3_coder, openai …); switches them on.",
    )
    extra_args: list[str] = Field(default_factory=list, description="Further command line options of vllm serve.")


_OWN: Final = CHAT | {"served_model_name", "runner", "reasoning_parser", "tool_call_parser"}

FLAGS: Options = MappingProxyType(
    {
        **of_keys(sorted(SETTINGS | _OWN | {"host", "port", "speculative_config", "allowed_media_domains"})),
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
    return options.refused_options(words, OWN_OPTIONS, KEY_OF_OPTION)


def settings(config: VllmServeConfig, *, context: int | None, cache_bytes: int) -> dict[str, JsonValue]:
    """The settings of a worker with this context and cache. Address and name are the launch's, and not in here."""
    values: dict[str, JsonValue] = {
        **engine_settings(config, context=context, cache_bytes=cache_bytes),
        **config.model_dump(mode="json", include=set(_OWN)),
        "runner": config.runner if config.runner != "auto" else None,
        "enable_auto_tool_choice": True if config.tool_call_parser else None,
    }
    return {key: value for key, value in values.items() if value is not None}
