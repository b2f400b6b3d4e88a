"""llm-pool's settings.json with local.json over it: each backend's fields, where a runtime here has an equivalent.

Each backend becomes the runtime of its name, and ct2 becomes ctranslate2.
Shared decoding settings and a model's thinking apply to requests, so they become defaults of a virtual model of the same
name: a request's `decoding` and `thinking` override them, as in llm-pool. Models that are `enabled` are loaded at the start;
all others can be loaded later, if this machine has their files and programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import JsonValue

from runtimes.adapters.vllm.config import VllmConfig
from runtimes.base import CHAT_TEMPLATE, Thinking
from runtimes.device_kind import CUDA, HOST
from runtimes.exllamav3.adapter import ExLlamaV3Config
from runtimes.llama_cpp.adapter import LlamaCppConfig
from runtimes.llama_cpp.shared.formats import CACHE_TYPES
from runtimes.llama_server.adapter.config import LlamaServerConfig
from runtimes.model_config import ModelConfig
from runtimes.openai_remote.adapter import SWITCHES
from runtimes.registry import REGISTRY
from runtimes.vllm.adapter.config import VllmWorkerConfig
from runtimes.vllm_serve.adapter import VllmServeConfig
from supervisor.catalog.document.document import whole_number
from supervisor.catalog.keys import is_loopback
from supervisor.cli.importers.draft import Draft, Values, list_of, object_of, text_of
from supervisor.cli.importers.llama_options import Options
from supervisor.cli.importers.vllm_options import VllmOptions
from supervisor.errors import ConfigError

_KEPT: Final = ("target_inflight", "modalities")
_REPLICAS: Final = ("replicas", "replica_max")
_COMMON: Final = frozenset({"backend", "model_path", "enabled", *_KEPT, *_REPLICAS, "enable_thinking", "prompt_format"})
_OPENAIS_DECODING: Final = ("temperature", "top_p", "max_tokens", "seed", "stop")
_REMOTE_DECODING: Final = ("temperature", "top_p", "max_tokens", "stop")
_RENAMED: Final = {
    "mmproj_path": "mmproj",
    "draft_model_path": "draft_model",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
    "start_timeout_s": "startup_limit_s",
    "n_parallel": "parallel",
}
_RENAMED_REMOTE: Final = {
    "base_url": "base_url",
    "api_key_env": "api_key_env",
    "model": "upstream_model",
    "timeout_s": "first_byte_s",
    "max_retries": "max_retries",
    "health_check": "health",
}
_AT_REST: Final = "it isn't loaded at the start, as before; but here a request loads it, too"
_BITS: Final = re.compile(r"\d+")  # of "Q8", 8, "8,4"
_WHOLE: Final = re.compile(r"-?\d+", re.ASCII)
_OFFERED: Final = 'it is there for requests that say allow_remote; "enabled: false" would take it away'
_FOR_ALL: Final = dict.fromkeys(("host", "port", "api_key"), "llmux chooses it") | {
    "timeout_s": "for all models together: limits.first_byte_s"
}
"""Fields of llm-pool's servers that models lack here."""


def merged(settings: Mapping[str, JsonValue], local: Mapping[str, JsonValue]) -> Values:
    """`local` over `settings`, key by key."""
    result = dict(settings)
    for key, value in local.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def convert(root: Mapping[str, JsonValue]) -> Draft:
    """The draft. Raises ConfigError where there are no models."""
    draft = Draft()
    engine, service = object_of(root.get("engine")), object_of(root.get("service"))
    models = object_of(engine.get("models"))
    if not models:
        raise ConfigError(("engine.models: there are no models",))
    draft.reserve(models)
    draft.server["responses"] = (
        "llm-pool"  # all requests to /v1/responses had its format, and /v1/models listed loaded models
    )
    draft.server.update({key: service[key] for key in ("host", "port", "log_level") if key in service})
    if isinstance(level := draft.server.get("log_level"), str):
        draft.server["log_level"] = level.lower()
    if isinstance(host := draft.server.get("host"), str) and not is_loopback(host):
        draft.look("service.host", f"others reach {host}, so llmux wants keys: llmux keys add NAME")
    for foreign_name, values in models.items():
        if isinstance(values, dict):
            _convert_model(draft, foreign_name, values, str(engine.get("backend") or ""))
        else:
            draft.lose(f"engine.models.{foreign_name}", "expected an object")
    decoding = object_of(engine.get("decoding"))
    known: set[str] = set()
    for name, model in draft.models.items():
        names = _decoding_of(str(model.get("runtime") or "llama_server"))
        known |= names.keys()
        draft.merge(name, name, "defaults", {names[key]: item for key, item in decoding.items() if key in names})
    why = dict.fromkeys(decoding, "requests have no such field") | {"beam_size": "no model here searches with beams"}
    draft.lose_unknown("engine.decoding.", decoding, known, why)
    draft.lose_unknown("service.", service, {"host", "port", "log_level"})
    draft.lose_unknown("engine.", engine, {"backend", "decoding", "models"})
    draft.lose_unknown("", root, {"service", "engine"})
    draft.list_models()
    return draft


def _decoding_of(runtime: str) -> dict[str, str]:
    """The request fields for the shared decoding settings. Remotes refuse unknown fields."""
    if runtime == "openai_remote":
        return {key: key for key in _REMOTE_DECODING}
    beyond = {key: names[0] for key, names in REGISTRY.get(runtime).decoding.items()}
    return {**{key: key for key in _OPENAIS_DECODING}, **beyond}


def _convert_model(draft: Draft, foreign_name: str, values: Values, usual: str) -> None:
    backend = str(values.get("backend") or usual)
    where = f"engine.models.{foreign_name}"
    convert_backend = _BACKENDS.get(backend)
    if convert_backend is None:
        unknown = f'there is no runtime for backend "{backend}"' if backend else "it has no backend"
        draft.lose(where, unknown)
        return
    if convert_backend in (_vllm, _vllm_serve) and not (values.get("vllm_model") or values.get("model_path")):
        draft.lose(where, "it has no vllm_model")
        return
    name = draft.name(foreign_name)
    model = draft.models[name] = {}
    convert_backend(draft, name, where, values)
    for key in _KEPT:
        if values.get(key) is not None:
            model[key] = values[key]
    for key in _REPLICAS:
        if values.get(key) not in (None, 1) and convert_backend is _remote:
            draft.lose(f"{where}.{key}", "others run it", model=name)
        elif values.get(key) is not None and values[key] != 1:
            model[key] = values[key]
    _set_preload(draft, name, f"{where}.enabled", values.get("enabled"), is_remote=convert_backend is _remote)
    if convert_backend is not _remote:
        if values.get("prompt_format") is not None:
            model["prompt_format"] = values["prompt_format"]
        _set_thinking(draft, name, values.get("enable_thinking"), CHAT_TEMPLATE)


def _set_preload(draft: Draft, name: str, at: str, enabled: JsonValue, *, is_remote: bool) -> None:
    """Set whether the model is loaded at the start. Operators may load any model later."""
    if enabled is False:
        draft.at_rest[name] = at
        draft.look(at, _OFFERED if is_remote else _AT_REST, model=name)
    elif enabled is True and not is_remote:
        draft.models[name]["preload"] = True
    elif not isinstance(enabled, bool | None):
        draft.lose(at, "expected true or false", model=name)


def _set_thinking(draft: Draft, name: str, wanted: JsonValue, switch: Thinking) -> None:
    """Set the default for requests that don't switch thinking on or off."""
    if isinstance(wanted, bool):
        draft.merge(name, name, "defaults", switch.enabled if wanted else switch.disabled)


def _backend_fields(values: Values, prefix: str) -> dict[str, JsonValue]:
    """The fields of a backend, without its prefix and without nulls."""
    return {
        key.removeprefix(prefix): item for key, item in values.items() if key.startswith(prefix) and item is not None
    }


def _command_words(draft: Draft, name: str, at: str, value: JsonValue) -> list[str]:
    """The words of a command line; none, with a note, for anything but a list."""
    if not isinstance(value, list):
        draft.lose(at, "expected a list of words", model=name)
    return [text_of(word) for word in list_of(value)]


def _report_unknown_fields(draft: Draft, name: str, where: str, values: Values, *prefixes: str) -> None:
    for key in values:
        if key not in _COMMON and not key.startswith(prefixes):
            draft.lose(f"{where}.{key}", "not a field of this backend", model=name)


def _llama_server(draft: Draft, name: str, where: str, values: Values) -> None:
    model = draft.models[name]
    if isinstance(path := values.get("model_path"), str):
        model |= {"path": path} if path.lower().endswith(".gguf") else {"runtime": "llama_server", "path": path}
    for field, value in _backend_fields(values, "llama_server_").items():
        key = _RENAMED.get(field, field)
        at = f"{where}.llama_server_{field}"
        if key == "extra_args":
            Options.read(_command_words(draft, name, at, value)).give(draft, name, at)
        elif key in {"n_gpu_layers", "spec_draft_ngl"}:
            text = text_of(value)
            model[key] = "all" if text == "-1" else value if (number := whole_number(text)) is None else number
        elif (key, value) == ("spec_type", "draft"):
            model[key] = "draft-simple"
        elif key == "reasoning" and value not in ("on", "off", "auto"):
            model["reasoning_format"] = value
        elif key in LlamaServerConfig.model_fields or key in LlamaServerConfig.former_keys:
            model[key] = value
        elif key == "embeddings":
            model |= {"type": "embedding"} if value is True else {}
        else:
            draft.lose(at, _FOR_ALL.get(key) or _remedy(LlamaServerConfig, key, "llama_server"), model=name)
    _report_unknown_fields(draft, name, where, values, "llama_server_")


def _remedy(config: type[ModelConfig], key: str, runtime: str) -> str:
    """The note for a key that the runtime doesn't have."""
    if (removed := config.removed_keys.get(key)) is not None:
        return removed.removeprefix("remove it: ")
    return f"{runtime} has no such key" + ("; try extra_args" if "extra_args" in config.model_fields else "")


def _llama_cpp(draft: Draft, name: str, where: str, values: Values) -> None:
    model = draft.models[name]
    model |= {"runtime": "llama_cpp", "path": values.get("model_path")}
    for field, value in _backend_fields(values, "gguf_").items():
        if field in {"type_k", "type_v"}:
            named = next((kind for kind, number in CACHE_TYPES.items() if number == value), value)
            model[field] = named.lower() if isinstance(named, str) else named
        elif field in LlamaCppConfig.model_fields:
            model[field] = int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else value
        else:
            draft.lose(f"{where}.gguf_{field}", _remedy(LlamaCppConfig, field, "llama_cpp"), model=name)
    why = (
        "llama-cpp-python, as before; its install compiles llama.cpp. runtime llama_server needs no compiler, and serves "
        "several requests at once: call type_k cache_type_k there, and type_v cache_type_v"
    )
    draft.look(f"{where}.backend", why, model=name)
    _report_unknown_fields(draft, name, where, values, "gguf_")


def _exllamav3(draft: Draft, name: str, where: str, values: Values) -> None:
    model = draft.models[name]
    model |= {"runtime": "exllamav3", "path": values.get("model_path")}
    for field, value in _backend_fields(values, "exllama_").items():
        at = f"{where}.exllama_{field}"
        if field == "cache_quant":
            bits: list[JsonValue] = [int(bit) for bit in _BITS.findall(text_of(value))]
            if bits and bits != [16]:
                model["cache_quant"] = bits if len(bits) > 1 else bits[0]
        elif field == "gpu_split":
            if parts := _gib_list(value):
                model |= {"gpu_split": parts, "gpus": len(parts)}
            elif value:
                draft.lose(at, "it isn't GiB of each GPU, such as 16,24; say on how many GPUs: gpus: 2", model=name)
        elif field in ExLlamaV3Config.model_fields:
            model[field] = value
        else:
            draft.lose(at, _remedy(ExLlamaV3Config, field, "exllamav3"), model=name)
    if model.get("tensor_parallel") and "gpus" not in model:
        model.pop("tensor_parallel")
        draft.lose(
            f"{where}.exllama_tensor_parallel", "say on how many GPUs: gpus: 2, and tensor_parallel: true", model=name
        )
    _report_unknown_fields(draft, name, where, values, "exllama_")


def _gib_list(value: JsonValue) -> list[JsonValue]:
    """`[16, 8]`, or as text "16,8"; empty for anything else."""
    words = list_of(value) if isinstance(value, list) else text_of(value).split(",")
    try:
        return [float(text_of(word)) for word in words]
    except ValueError:
        return []


def _ct2(draft: Draft, name: str, where: str, values: Values) -> None:
    model = draft.models[name]
    model |= {"runtime": "ctranslate2", "path": values.get("model_path")}
    if values.get("compute_type") is not None:
        model["compute_type"] = values["compute_type"]
    kind, _, index = text_of(values.get("device") or "cuda").partition(":")
    if kind == "cpu":
        model["devices"] = [HOST.device_id()]
    elif (number := whole_number(index)) is not None:
        model["devices"] = [CUDA.device_id(number)]  # otherwise llmux chooses the device
    _report_unknown_fields(draft, name, where, values, "device", "compute_type")


def _vllm(draft: Draft, name: str, where: str, values: Values) -> None:
    own = {key: item for key, item in values.items() if not key.startswith("vllm_serve_")}
    _convert_vllm(draft, name, where, own, VllmWorkerConfig)
    for key in sorted(values.keys() - own.keys()):
        draft.lose(f"{where}.{key}", "not a field of this backend", model=name)


def _vllm_serve(draft: Draft, name: str, where: str, values: Values) -> None:
    _convert_vllm(draft, name, where, values, VllmServeConfig)


def _convert_vllm(draft: Draft, name: str, where: str, values: Values, keys: type[VllmConfig]) -> None:
    model = draft.models[name]
    fields, serve = _backend_fields(values, "vllm_"), _backend_fields(values, "vllm_serve_")
    what = text_of(fields.pop("model", None) or values.get("model_path"))
    runtime = "vllm_serve" if keys is VllmServeConfig else "vllm"
    model["runtime"] = runtime
    model["path" if what.startswith(("/", ".", "~")) else "model"] = what
    for field, value in fields.items():
        if field.startswith("serve_"):
            continue
        if field in keys.model_fields or field in keys.former_keys:
            model[field] = value
        else:
            draft.lose(f"{where}.vllm_{field}", _remedy(keys, field, runtime), model=name)
    for field, value in serve.items():
        key, at = _RENAMED.get(field, field), f"{where}.vllm_serve_{field}"
        if key == "extra_args":
            options = VllmOptions.read(_command_words(draft, name, at, value))
            for option, item in options.keys.items():
                model.setdefault(option, item)
            for option, why in options.lost:
                draft.lose(f"{at}.{option}", why, model=name)
        elif key in {"binary", "env", "library_path", "startup_limit_s"}:
            model[key] = value
        else:
            draft.lose(at, _FOR_ALL.get(key) or _remedy(keys, key, "vllm_serve"), model=name)
    draft_model = text_of(model.get("speculative_model") or "/")
    if "path" in model and not draft_model.startswith("/"):
        why = f"its worker loads nothing from the hub, so get it before: hf download {draft_model}"
        draft.look(f"{where}.vllm_speculative_model", why, model=name)
    if "kv_cache_memory_bytes" not in model:
        why = "the KV cache is as large as one longest request needs; set kv_cache_memory_bytes, or vram_mib for all"
        draft.look(f"{where}.vllm_gpu_memory_utilization", why, model=name)
        model.pop("gpu_memory_utilization", None)
    for key, usual in (
        ("max_model_len", "is as large as the device has room for, up to 32768"),
        ("max_num_seqs", "is 8"),
    ):
        if key not in model:
            draft.look(f"{where}.vllm_{key}", f"{usual}, where it isn't set", model=name)
    _report_unknown_fields(draft, name, where, values, "vllm_")


def _remote(draft: Draft, name: str, where: str, values: Values) -> None:
    model = draft.models[name]
    model["runtime"] = "openai_remote"
    for field, value in _backend_fields(values, "remote_").items():
        at = f"{where}.remote_{field}"
        if field in _RENAMED_REMOTE:
            model[_RENAMED_REMOTE[field]] = value
        elif field == "thinking" and value in ("enabled", "disabled"):
            model["thinking_field"] = "thinking"
            _set_thinking(draft, name, value == "enabled", SWITCHES["thinking"])
        elif field == "api_kind":
            if value != "chat_completions":
                draft.lose(at, "requests are passed on as they are", model=name)
        else:
            draft.lose(at, "openai_remote has no such key", model=name)
    if values.get("remote_api_kind") in (None, "chat_completions"):
        model["endpoints"] = [
            "/v1/chat/completions"
        ]  # the only path that llm-pool uses there; llmux translates the others to it
    if isinstance(values.get("enable_thinking"), bool):
        model["thinking_field"] = "thinking"
        _set_thinking(draft, name, values["enable_thinking"], SWITCHES["thinking"])
    if values.get("prompt_format") not in (None, "generic"):
        draft.look(f"{where}.prompt_format", "prompts are written where the model runs", model=name)
    draft.look(
        f"{where}.backend", "requests must say allow_remote, as before; allow_remote: true lets all of them", model=name
    )
    _report_unknown_fields(draft, name, where, values, "remote_")


_BACKENDS: Final[Mapping[str, Callable[[Draft, str, str, Values], None]]] = {
    "ct2": _ct2,
    "exllamav3": _exllamav3,
    "llama_server": _llama_server,
    "llama_cpp": _llama_cpp,
    "gguf": _llama_cpp,
    "vllm": _vllm,
    "vllm_serve": _vllm_serve,
    "openai_remote": _remote,
}
