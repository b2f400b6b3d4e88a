"""The embedded llama.cpp server: run by the interpreter of the runtime's own venv, with one JSON argument.

    <venv>/bin/python -I launcher.py '{"model": "/m.gguf", "host": "127.0.0.1", "port": 8101, "n_ctx": 4096, ...}'

The settings are those of runtimes/llama_server/adapter/config.py; the API key is in LLAMA_API_KEY, never in argv. SIGTERM and
SIGINT keep their default action, so that the process ends at once in any phase, even during a load. It exits with 1 if the
model can't be loaded or the port can't be bound, with 2 for an unknown setting; the reason is on stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xllamacpp

ATTRIBUTES = {
    "model": "model.path",
    "port": "port",
    "n_ctx": "n_ctx",
    "n_gpu_layers": "n_gpu_layers",
    "mmproj": "mmproj.path",
    "mmproj_offload": "mmproj_use_gpu",
    "image_min_tokens": "image_min_tokens",
    "image_max_tokens": "image_max_tokens",
    "draft_model": "speculative.draft.mparams.path",
    "spec_draft_n_max": "speculative.draft.n_max",
    "spec_draft_p_min": "speculative.draft.p_min",
    "spec_draft_ngl": "speculative.draft.n_gpu_layers",
    "reasoning_budget": "sampling.reasoning_budget_tokens",
    "threads": "cpuparams.n_threads",
    "threads_batch": "cpuparams_batch.n_threads",
    "parallel": "n_parallel",
    "kv_unified": "kv_unified",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "rope_freq_base": "rope_freq_base",
    "rope_freq_scale": "rope_freq_scale",
    "yarn_orig_ctx": "yarn_orig_ctx",
    "embeddings": "embedding",
    "jinja": "use_jinja",
    "chat_template": "chat_template",
    "cache_ram_mib": "cache_ram_mib",
    "metrics": "endpoint_metrics",
}
"""Settings that are assigned unchanged."""

ENUMS = {
    "cache_type_k": ("cache_type_k", "ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("cache_type_v", "ggml_type", "GGML_TYPE_"),
    "pooling": ("pooling_type", "llama_pooling_type", "LLAMA_POOLING_TYPE_"),
    "rope_scaling": ("rope_scaling_type", "llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
    "reasoning_format": ("reasoning_format", "common_reasoning_format", "COMMON_REASONING_FORMAT_"),
}
"""Settings whose value is a member of an enumeration, in lower case."""

FLASH_ATTENTION = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
LOAD_MODES = {"dio": "DIRECT_IO", "mmap+mlock": "MMAP_MLOCK"}


def apply_flash_attn(params: Any, value: str) -> None:
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = kinds["LLAMA_FLASH_ATTN_TYPE_" + FLASH_ATTENTION[value]]


def apply_load_mode(params: Any, value: str) -> None:
    name = LOAD_MODES.get(value, value.upper())
    params.load_mode = xllamacpp.llama_load_mode["LLAMA_LOAD_MODE_" + name]


def apply_spec_type(params: Any, value: str) -> None:
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [kinds["COMMON_SPECULATIVE_TYPE_" + value.upper().replace("-", "_")]]


def apply_reasoning(params: Any, value: str) -> None:
    params.enable_reasoning = {"on": 1, "off": 0}[value]
    params.default_template_kwargs = {"enable_thinking": "true" if value == "on" else "false"}


def apply_rerank(params: Any, value: bool) -> None:
    params.embedding = value
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK


def apply_lora(params: Any, value: list[str]) -> None:
    adapters = []
    for path in value:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = path, 1.0
        adapters.append(adapter)
    params.lora_adapters = adapters


def apply_chat_template_file(params: Any, value: str) -> None:
    params.chat_template = Path(value).read_text(encoding="utf-8")


def apply_host(params: Any, value: str) -> None:
    params.hostnames = [value]


def apply_alias(params: Any, value: str) -> None:
    params.model_alias = {value}


SPECIAL: dict[str, Callable[[Any, Any], None]] = {
    "flash_attn": apply_flash_attn,
    "load_mode": apply_load_mode,
    "spec_type": apply_spec_type,
    "reasoning": apply_reasoning,
    "rerank": apply_rerank,
    "lora": apply_lora,
    "chat_template_file": apply_chat_template_file,
    "host": apply_host,
    "alias": apply_alias,
}


def apply(params: Any, key: str, value: Any) -> None:
    """Set one of llama.cpp's parameters. Raises KeyError for an unknown setting."""
    if key in SPECIAL:
        SPECIAL[key](params, value)
        return
    if key in ENUMS:
        path, enum, prefix = ENUMS[key]
        value = getattr(xllamacpp, enum)[prefix + value.upper().replace("-", "_")]
    else:
        path = ATTRIBUTES[key]
    *parents, attribute = path.split(".")
    target = params
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, attribute, value)


def parameters(settings: dict[str, Any], key: str) -> Any:
    """llama.cpp's parameters for these settings; `key` is the only accepted API key."""
    params = xllamacpp.CommonParams()
    params.api_keys = [key] if key else []
    params.fit_params = False  # the supervisor has reserved the memory that these settings take
    params.ui = False
    for name, value in settings.items():
        apply(params, name, value)
    if params.embedding:  # llama.cpp asserts that an embedded prompt fits one physical batch
        params.n_batch = min(params.n_batch, params.n_ubatch)
    return params


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = json.loads(argv[1])
    key = os.environ.pop("LLAMA_API_KEY", "")
    try:
        params = parameters(settings, key)
    except KeyError as error:
        print(f"llama_server launcher: the embedded server doesn't know {error}", file=sys.stderr, flush=True)
        return 2
    try:
        server = xllamacpp.Server(params)  # returns when the model is loaded and the port is open
    except RuntimeError as error:
        print(f"llama_server launcher: exiting: {error}", file=sys.stderr, flush=True)
        return 1
    print(
        f"llama_server launcher: serving {settings['model']} at {server.listening_address}", file=sys.stderr, flush=True
    )
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
