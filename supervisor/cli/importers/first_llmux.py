"""The first llmux: one process for all models, with `models.yaml` and, beside it, `api_keys.yaml`.

Models keep all their virtual models, clients keep their keys (as digests). The estimates of memory are not imported: here
they would override the figures that are computed from the files and then measured.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from glob import escape
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.adapters.vllm.memory import cached_folder, hub_cache
from runtimes.chatterbox.adapter import OTHERS, WEIGHTS
from supervisor.catalog.keys import weakness
from supervisor.cli.importers.draft import Draft, Values, list_of, object_of, text_of
from supervisor.errors import ConfigError

KEYS_FILE: Final = "api_keys.yaml"
_SECTIONS: Final = frozenset({"physical_models", "virtual_models"})
_COMMON: Final = frozenset({"type", "backend", "estimated_vram_gb", "supports_vision", "supports_tools"})
_KNOWN_OF_BACKEND: Final = {
    "transformers": frozenset({"model_id", "default_language"}),
    "llamacpp": frozenset({"model_file", "mmproj_file", "model_id"}),
    "chatterbox": frozenset({"variant", "default_language"}),
}
_TURBO: Final = "turbo"
_PARAMETERS: Final = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
_QUANTISED: Final = re.compile(r"fp8|fp4|int[48]|[48]-?bit|awq|gptq|bnb|gpt-oss", re.IGNORECASE)
_NARROWER: Final = {"bitsandbytes-8bit": 1 / 2, "bitsandbytes-4bit": 4.5 / 16}
_OVERHEAD: Final = 1.25
"""The memory of weights, context and program together, as a factor of the weights."""

Find = Callable[[str], Path | None]
"""Finds a file or a model's folder that was downloaded for the first llmux; None: it is missing."""


def models_folder(config: Path) -> Find:
    """The finder of files for the configuration `config`: models lie in the folder `models` beside that file.

    There they are files and folders, or a cache of the hub; the user's own cache is searched, too.
    """
    folder = config.absolute().parent / "models"
    hubs = (folder, folder / "hub", hub_cache())

    def find(name: str) -> Path | None:
        places = [folder / name, folder / name.rpartition("/")[2]]
        if "/" in name:
            places += filter(None, (cached_folder(name, place=place) for place in hubs))
        else:
            places += (file for place in hubs for file in sorted(place.glob(f"models--*/snapshots/*/{escape(name)}")))
        return next((place for place in places if place.exists()), None)

    return find


def convert(root: Mapping[str, JsonValue], keys: Mapping[str, JsonValue], find: Find) -> Draft:
    """The draft. Raises ConfigError where there are no models."""
    draft = Draft()
    models = object_of(root.get("physical_models"))
    if not models:
        raise ConfigError(("physical_models: there are no models",))
    draft.reserve([*models, *object_of(root.get("virtual_models"))])
    for foreign_name, values in models.items():
        if isinstance(values, dict):
            _convert_model(draft, foreign_name, values, find)
        else:
            draft.lose(f"physical_models.{foreign_name}", "expected a mapping")
    for name, values in object_of(root.get("virtual_models")).items():
        _convert_virtual_model(draft, name, object_of(values))
    if any("estimated_vram_gb" in object_of(values) for values in models.values()):
        why = "are left out: memory is computed from the files now, and measured at the first load"
        draft.look("physical_models.*.estimated_vram_gb", why)
    types = [object_of(values).get("type") for name, values in models.items() if draft.name(name) in draft.models]
    if single := {kind: 1 for kind in ("llm", "tts") if types.count(kind) > 1}:
        draft.limits["max_loaded"] = dict(single)
        draft.look(
            "limits.max_loaded", "one language model and one voice at a time, as before; remove it to go by memory"
        )
    draft.lose_unknown("", root, _SECTIONS)
    _convert_keys(draft, keys)
    return draft


def _convert_model(draft: Draft, foreign_name: str, values: Values, find: Find) -> None:
    where, backend = f"physical_models.{foreign_name}", text_of(values.get("backend"))
    take = {"transformers": _transformers, "llamacpp": _llama_cpp, "chatterbox": _chatterbox}.get(backend)
    if take is None:
        draft.lose(where, f'there is no runtime for backend "{backend}"')
        return
    name = draft.name(foreign_name)
    model = draft.models[name] = {}
    take(draft, name, values, find)
    if "default_language" in values and backend != "llamacpp":
        model["default_language"] = values["default_language"]
    if values.get("type") not in (None, "llm") and backend != "chatterbox":
        model["type"] = values["type"]
    if values.get("supports_vision") is True:
        model["modalities"] = ["text", "image"]
    if values.get("supports_tools") is False and backend == "transformers":
        model["tool_format"] = "none"
    elif values.get("supports_tools") is False:
        draft.lose(f"{where}.supports_tools", "the model's chat template says whether it takes tools", model=name)
    if backend == "llamacpp":
        why = "is llama.cpp's own server now; for llama-cpp-python, which takes no pictures, say runtime: llama_cpp"
        draft.look(f"{where}.backend", why, model=name)
    if "estimated_vram_gb" in values:
        draft.comment(
            name, f"Was estimated at {text_of(values['estimated_vram_gb'])} GB. Set vram_mib only to what was measured."
        )
    draft.lose_unknown(f"{where}.", values, _COMMON | _KNOWN_OF_BACKEND[backend], model=name)


def _transformers(draft: Draft, name: str, values: Values, find: Find) -> None:
    model, repo = draft.models[name], text_of(values.get("model_id"))
    model["runtime"] = "transformers"
    if folder := find(repo):
        model["path"] = str(folder)
    else:
        model["source"] = {"repo": repo}
    estimate = values.get("estimated_vram_gb")
    wide = _unquantised_gb(folder, repo)
    if (
        isinstance(estimate, int | float)
        and wide is not None
        and values.get("type") in (None, "llm")
        and wide > estimate * 1.2
    ):
        fits = next(
            (name for name, share in _NARROWER.items() if wide * share * _OVERHEAD <= estimate), "bitsandbytes-4bit"
        )
        why = f"{estimate} GB can't hold its weights, which are 16 bits wide: about {wide:.0f} GB; quantization: {fits} fits"
        draft.look(f"physical_models.{name}.estimated_vram_gb", why, model=name)


def _unquantised_gb(folder: Path | None, repo: str) -> float | None:
    """GB of 16-bit weights, by the folder, else by the repository's name; None: quantised, or unknown."""
    if folder is None:
        found = None if _QUANTISED.search(repo) else _PARAMETERS.search(repo)
        return None if found is None else float(found[1]) * 2
    try:
        config = json.loads((folder / "config.json").read_text())
        is_narrow = "quantization_config" in config or "quantization_config" in config.get("text_config", {})
        return None if is_narrow else sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _llama_cpp(draft: Draft, name: str, values: Values, find: Find) -> None:
    model, repo = draft.models[name], values.get("model_id")
    wanted = {
        key: text_of(values[foreign_name])
        for key, foreign_name in (("path", "model_file"), ("mmproj", "mmproj_file"))
        if foreign_name in values
    }
    found = {key: path for key, file in wanted.items() if (path := find(file)) is not None}
    if isinstance(repo, str) and len(found) < len(wanted):
        model |= {"runtime": "llama_server", "source": {"repo": repo, "files": list[JsonValue](wanted.values())}}
    else:
        model |= {key: str(found.get(key, file)) for key, file in wanted.items()}


def _chatterbox(draft: Draft, name: str, values: Values, find: Find) -> None:
    model, variant = draft.models[name], text_of(values.get("variant", "default"))
    model |= {"runtime": "chatterbox", "variant": variant}
    repo = "ResembleAI/chatterbox-turbo" if variant == _TURBO else "ResembleAI/chatterbox"
    further = ("*.json", "*.txt") if variant == _TURBO else OTHERS.get(variant, ())
    if folder := find(repo):
        model["path"] = str(folder)
    else:
        model["source"] = {"repo": repo, "files": [*WEIGHTS.get(variant, ()), "conds.pt", *further]}
    model["voice_aliases"] = {"alloy": "default"}
    draft.comment(name, "Clients that insist on OpenAI's voice alloy get the model's own; see `voices` for others.")


def _convert_virtual_model(draft: Draft, name: str, values: Values) -> None:
    where, physical = f"virtual_models.{name}", draft.name(text_of(values.get("physical")))
    if physical not in draft.models:
        draft.lose(where, f"there is no model {physical}")
        return
    ours = draft.virtual(draft.name(name), physical)
    for key, value in object_of(values.get("params")).items():
        if key in ("enable_thinking", "system_prompt_prefix"):
            ours[key] = value
        else:
            draft.merge(draft.name(name), physical, "defaults", {key: value})
    draft.lose_unknown(f"{where}.", values, {"physical", "params"})


def _convert_keys(draft: Draft, root: Mapping[str, JsonValue]) -> None:
    """Add the keys as digests: the keys keep working, and nobody can read them out of the file."""
    for index, entry in enumerate(list_of(root.get("api_keys"))):
        key, name = object_of(entry).get("key"), text_of(object_of(entry).get("name") or f"key {index + 1}")[:90]
        problem = weakness(key) if isinstance(key, str) else "is no text"
        if problem is not None:
            draft.lose(f"api_keys[{index}]", f"the key {problem}; make a new one with: llmux keys add NAME")
            continue
        digest = hashlib.sha256(str(key).encode()).hexdigest()
        if any(known["key_sha256"] == digest for known in draft.keys):
            draft.lose(f"api_keys[{index}]", "the same key is there already")
            continue
        if any(known["name"] == name for known in draft.keys):
            name = f"{name} {index + 1}"
        draft.keys.append({"name": name, "key_sha256": digest, "scopes": ["inference"]})
    if draft.keys:
        draft.look(
            "api_keys",
            "keep working for inference; operators need a key of their own: llmux keys add NAME --scope admin",
        )
