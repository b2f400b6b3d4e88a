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
from pathlib import Path
from typing import Any

import xllamacpp

_UNCHANGED = """
port n_ctx n_gpu_layers image_min_tokens image_max_tokens kv_unified rope_freq_base rope_freq_scale yarn_orig_ctx
chat_template cache_ram_mib
"""
ATTRIBUTES = {name: name for name in _UNCHANGED.split()} | {
    "model": "model.path",
    "mmproj": "mmproj.path",
    "mmproj_offload": "mmproj_use_gpu",
    "draft_model": "speculative.draft.mparams.path",
    "spec_draft_n_max": "speculative.draft.n_max",
    "spec_draft_p_min": "speculative.draft.p_min",
    "spec_draft_ngl": "speculative.draft.n_gpu_layers",
    "reasoning_budget": "sampling.reasoning_budget_tokens",
    "threads": "cpuparams.n_threads",
    "threads_batch": "cpuparams_batch.n_threads",
    "parallel": "n_parallel",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "embeddings": "embedding",
    "jinja": "use_jinja",
    "metrics": "endpoint_metrics",
}
"""Settings that are assigned unchanged."""

ENUMS = {
    "cache_type_k": ("cache_type_k", "ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("cache_type_v", "ggml_type", "GGML_TYPE_"),
    "flash_attn": ("flash_attn_type", "llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    "load_mode": ("load_mode", "llama_load_mode", "LLAMA_LOAD_MODE_"),
    "pooling": ("pooling_type", "llama_pooling_type", "LLAMA_POOLING_TYPE_"),
    "rope_scaling": ("rope_scaling_type", "llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
    "reasoning_format": ("reasoning_format", "common_reasoning_format", "COMMON_REASONING_FORMAT_"),
}
"""Settings with a member of an enumeration as their value: the member in lower case, or a key of MEMBERS."""

MEMBERS = {"on": "ENABLED", "off": "DISABLED", "dio": "DIRECT_IO", "mmap+mlock": "MMAP_MLOCK"}


def member(enum: str, prefix: str, value: str) -> Any:
    return getattr(xllamacpp, enum)[prefix + MEMBERS.get(value, value.upper().replace("-", "_"))]


def lora_adapter(path: str) -> Any:
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path, adapter.scale = path, 1.0
    return adapter


def apply(params: Any, key: str, value: Any) -> None:
    """Set one of llama.cpp's parameters. Raises KeyError for an unknown setting."""
    match key:
        case "spec_type":
            kinds = [value] if isinstance(value, str) else value
            params.speculative.types = [
                member("common_speculative_type", "COMMON_SPECULATIVE_TYPE_", kind) for kind in kinds
            ]
        case "reasoning":
            params.enable_reasoning = {"on": 1, "off": 0}[value]
            params.default_template_kwargs = {"enable_thinking": "true" if value == "on" else "false"}
        case "rerank":
            params.embedding = value
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
        case "lora":
            params.lora_adapters = [lora_adapter(path) for path in value]
        case "chat_template_file":
            params.chat_template = Path(value).read_text(encoding="utf-8")
        case "host":
            params.hostnames = [value]
        case "alias":
            params.model_alias = {value}
        case _ if key in ENUMS:
            attribute, enum, prefix = ENUMS[key]
            setattr(params, attribute, member(enum, prefix, value))
        case _:
            *parents, attribute = ATTRIBUTES[key].split(".")
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
