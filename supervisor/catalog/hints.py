"""Our keys for the words of other programs: llama.cpp, llama-swap, Ollama, vLLM, llm-pool.

Used for unknown keys. Options of the runtime's own program are in the runtime's table (`ModelConfig.options`). The tables here
have only words of other programs, and words without a key because llmux has the feature in another form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

_KEYS: Final[Mapping[str, str]] = {
    "n_ctx max_model_len": (
        "c ctx ctx_size context context_length context_size num_ctx n_ctx max_model_len max_context_length max_seq_len"
    ),
    "n_gpu_layers": "ngl gpu_layers num_gpu n_gpu_layers",
    "parallel max_num_seqs": "np n_parallel num_parallel slots max_num_seqs",
    "flash_attn": "fa flash_attention",
    "cache_type_k": "ctk type_k",
    "cache_type_v": "ctv type_v",
    "kv_cache_dtype cache_type_k": "kv_cache_dtype kv_cache_type",
    "threads": "t n_threads num_thread num_threads",
    "batch_size max_num_batched_tokens": "b n_batch num_batch max_num_batched_tokens",
    "mmproj": "mm mmproj_path mmproj_file projector",
    "draft_model speculative_model": "md model_draft draft_model_path",
    "lora": "adapter adapters lora_adapters",
    "path model": "m model model_path model_file file gguf weights",
    "runtime": "backend engine",
    "keep_alive_s": "ttl keep_alive idle_timeout sleep_idle_seconds unload_after stay_warm stay_warm_s",
    "health_path": "check_endpoint health_check health_endpoint health",
    "stop_cmd": "cmd_stop",
    "kill_cmd": "cmd_kill",
    "upstream_model": "use_model_name served_model_name",
    "target_inflight concurrency": "concurrency_limit max_concurrency",
    "replicas": "num_workers workers num_replicas min_replicas",
    "replica_max": "max_replicas replicas_max max_workers",
    "request_rate": "requests_per_minute rate_limit rate_limits max_requests_per_minute rpm rpm_limit",
    "token_rate": "tokens_per_minute max_tokens_per_minute tpm tpm_limit",
    "concurrency": "max_parallel_requests concurrent_requests max_concurrent_requests",
    "startup_limit_s": "health_check_timeout start_timeout start_timeout_s startup_timeout",
    "preload": "load_on_startup autoload on_startup",
    "gpus tensor_parallel_size": "tensor_parallel_size tp",
    "host": "listen bind bind_address address",
    "log_level": "log_level log",
    "allowed_origins": "cors cors_origins origins",
    "queue_total": "max_queue max_queue_size max_queue_depth queue_size",
    "queue_wait_s": "max_wait_s max_wait queue_timeout queue_timeout_s queue_timeout_ms",
    "worker_port_first": "start_port",
    "models_dir": "download_dir models_path",
    "strip": "strip_params drop_params",
    "force": "set_params",
    "defaults": "params parameters sampling",
    "enable_thinking": "think thinking",
    "system_prompt_prefix": "system system_prompt",
}
"""Our keys, the first that is valid in the section wins, and other programs' words for them."""

_OF_NO_MODEL: Final = (
    *("host", "log_level", "allowed_origins", "queue_total", "queue_wait_s", "worker_port_first", "models_dir"),
    *("request_rate", "token_rate", "concurrency"),
    *("strip", "force", "defaults", "enable_thinking", "system_prompt_prefix"),
)

_RUNTIMES: Final = ("llamacpp llama.cpp ggml gguf ollama lmstudio", "llama_server")

_IMPORT: Final = "`llmux config import FILE` turns a configuration of {} into one of llmux"
_SWAP: Final = _IMPORT.format("llama-swap")

_ELSEWHERE: Final[Mapping[str, str]] = {
    "request fields stand under defaults of a virtual model": (
        "temperature temp top_p top_k min_p seed stop repeat_penalty presence_penalty frequency_penalty "
        "repetition_penalty mirostat n_predict num_predict max_tokens max_new_tokens"
    ),
    "another name for a model is a virtual model: virtual_models: {NAME: {model: THIS-MODEL}}": "aliases alias name names use_model_name served_model_name",
    "that belongs to a virtual model: enable_thinking": "enable_thinking think thinking",
    "that belongs to a virtual model: system_prompt_prefix": "system system_prompt system_prompt_prefix",
    "that belongs to a virtual model: its strip and force": "filters strip_params set_params",
    "that belongs to a virtual model: description": "description",
    "files from a hub are named by source: {repo: OWNER/NAME, files: [FILE.gguf]}": (
        "hf hfr hf_repo hff hf_file model_id repo repo_id hub from docker_repo huggingface model_url"
    ),
    "llmux chooses address and port of each worker; a server that runs elsewhere has runtime: openai_remote and base_url": "proxy url base_url endpoint host port listen",
    "llmux knows where to ask this runtime for its health": "check_endpoint health_path health_check",
    "llmux stops a worker itself: SIGTERM, and SIGKILL after grace_s": "cmd_stop stop_cmd",
    "write public: false": "unlisted hidden",
    "every virtual model is listed; a model behind one only with public: true": "include_aliases_in_list",
    f"YAML's own anchors do that: x-mine: &mine … and *mine. {_SWAP}": "macros",
    f"llmux decides by memory; limits.max_loaded, and pin and priority of a model say what stays. {_SWAP}": "groups matrix",
    f"a model with preload: true is loaded at the start. {_SWAP}": "hooks",
    f"each model of another server is one with runtime: openai_remote, base_url and upstream_model. {_SWAP}": "peers",
    f"write keep_alive_s for each model, or limits.keep_alive by type. {_SWAP}": "global_ttl",
    f"write startup_limit_s for each model. {_SWAP}": "health_check_timeout",
    f"write server.worker_port_first. {_SWAP}": "start_port",
    "write server.log_level": "log_level",
    "keys of clients are in a file of their own: llmux keys add NAME": "api_keys api_key keys",
    _IMPORT.format("llm-pool"): "service engine",
    _IMPORT.format("the first llmux"): "physical_models",
    "limits.connect_s, limits.first_byte_s and limits.stream_idle_s are for all models": "timeouts timeout",
    "llmux gives each worker its devices: gpus says how many, devices which (gpu0, gpu1)": (
        "tensor_split ts split_mode sm main_gpu mg device dev cuda_visible_devices tensor_parallel_size tp gpu num_gpus"
        " pipeline_parallel_size pp"
    ),
    "llmux counts memory in MiB: vram_mib of a model, margin_mib of a device": "gpu_memory_utilization vram vram_gb vram_mb estimated_vram_gb memory gpu_memory",
    "llmux counts the memory before a start, and the worker takes exactly that": "fit fitt fit_target fit_ctx",
    "write limits.max_loaded: {llm: N}": "max_loaded_models models_max",
    "llmux takes it from the model and its files": "supports_vision supports_tools capabilities template",
    "see modalities": "vision multimodal",
    'how llama.cpp reads the file is an option: extra_args: ["--load-mode", "mlock"], or none, mmap, mmap+mlock, dio': (
        "mlock mmap no_mmap use_mmap use_mlock"
    ),
}
"""Features that llmux has in another form: how to get them, and other programs' words for them."""


def runtime(word: str) -> str | None:
    """Our runtime for another program's name."""
    words, ours = _RUNTIMES
    return ours if _normalized(word) in words.split() else None


def _normalized(word: str) -> str:
    return word.lstrip("-").replace("-", "").replace("_", "").casefold()


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    return {_normalized(word): ours for ours, words in reversed([*table.items()]) for word in words.split()}


_KEY_OF: Final = _by_word({ours: f"{ours.partition(' ')[0]} {words}" for ours, words in _KEYS.items()})
_INSTEAD_OF: Final = _by_word(_ELSEWHERE)


def hint(word: str, known: Collection[str], options: Mapping[str, str] | None = None) -> str | None:
    """Advice on what to write instead of another program's word, as the end of a sentence; None: no program has that word.

    `known`: the valid keys in the section. `options`: of the runtime's own program, with their keys.
    """
    if word in known:
        return None
    option = word.lstrip("-").replace("_", "-")
    of_option = [(options or {}).get(dashes + option, "") for dashes in ("--", "-")]
    keys = _KEY_OF.get(_normalized(word), "").split()
    ours = next((key for key in (*of_option, *keys) if key in known), None)
    if ours is not None:
        return f'; did you mean "{ours}"?'
    instead = _INSTEAD_OF.get(_normalized(word))
    if instead is None and keys and keys[0] not in _OF_NO_MODEL:
        if "cmd" in known:
            instead = "options of the program stand in cmd"
        elif "runtime" not in known and "models" not in known:
            instead = f"that belongs to a model: {keys[0]}"
    return None if instead is None else f"; {instead}"
