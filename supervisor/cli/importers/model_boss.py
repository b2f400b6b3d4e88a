"""model-boss: `manifest.yaml`, and `tasks.yaml` beside it.

Its coordinator has few keys of its own; all other keys of a llama-server model are llama-server's options, and are
imported like a command line. A model's `priority` counts downwards there and upwards here, so it is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import JsonValue

from runtimes.base import CHAT_TEMPLATE
from runtimes.llama_server.adapter.config import FLAGS, KEY_OF_OPTION
from supervisor.cli.importers.draft import Draft, Values, list_of, object_of, text_of
from supervisor.cli.importers.llama_options import Options
from supervisor.errors import ConfigError

TASKS_FILE: Final = "tasks.yaml"
PORT: Final = 8210
"""The port that model-boss's clients use."""
CLAUDE: Final = "claude:"
"""The prefix of models that Claude's command line program runs; a manifest need not list these."""

_IDS: Final = ("id", "model_id", "name")
_PATHS: Final = ("path", "model_path", "file")
_REPOS: Final = ("repo", "repo_id", "hf_repo")
_OWN: Final = frozenset({"vram_mb", "backend", "category", "pin", *_PATHS, *_REPOS})
_CATEGORIES: Final = {
    "llm": "llm",
    "text": "llm",
    "chat": "llm",
    "vision": "vision",
    "diffusion": "image",
    "image": "image",
}
_BACKENDS: Final = {"llama-server": "llama_server", "diffusers": "diffusers"}
_THINKING: Final = ("thinking", "thinking_mode", "enable_thinking")
_SWITCH_WORDS: Final = {"true": True, "on": True, "enabled": True, "false": False, "off": False, "disabled": False}
_SAME: Final = {"pin": "pin", "vram_mb": "vram_mib", "stay_warm_s": "keep_alive_s", "enabled": "enabled"}
_LOST: Final = {
    "priority": "counts downwards there: here the model with the lowest `priority` goes first; by type where it isn't set",
    "pipeline": "the folder's model_index.json says which pipeline it is",
    "pipeline_type": "the folder's model_index.json says which pipeline it is",
}
_TASK: Final = frozenset({"candidates", "pin_primary", "keep_alive_s", "budget_s", "description"})


def is_manifest(root: Mapping[str, JsonValue]) -> bool:
    """Whether the file is model-boss's: llama-swap's models each have a command."""
    entries = [values for _, values in _entries(root.get("models"))]
    return any(_OWN & values.keys() for values in entries) and not any("cmd" in values for values in entries)


def convert(root: Mapping[str, JsonValue], tasks: Mapping[str, JsonValue]) -> Draft:
    """The draft. Raises ConfigError where there are no models."""
    draft = Draft()
    entries = [*_entries(root.get("models"))]
    draft.reserve(name for name, _ in entries)
    for foreign_name, values in entries:
        _convert_model(draft, foreign_name, values)
    if not draft.models:
        raise ConfigError(("models: there are no models",))
    for name, task in object_of(tasks.get("tasks") or dict(tasks)).items():
        _convert_task(draft, name, object_of(task))
    draft.limits["keep_alive"] = "by_type"
    draft.look("limits.keep_alive", "by_type: models stay as long as before, image 900 s, llm 300 s, vision 60 s")
    draft.server["port"] = PORT
    draft.look("server.port", f"{PORT}, where your clients ask")
    draft.lose_unknown("", root, {"models", "version"})
    draft.list_models()
    return draft


def _entries(models: JsonValue) -> Iterator[tuple[str, Values]]:
    """The entries with their names: from a mapping by name, or from a list of mappings with names."""
    if isinstance(models, dict):
        yield from ((name, object_of(values)) for name, values in models.items())
    for at, values in enumerate(map(object_of, list_of(models))):
        name = next((values[key] for key in _IDS if values.get(key)), f"model-{at + 1}")
        yield text_of(name), {key: item for key, item in values.items() if item != name or key not in _IDS}


def _convert_model(draft: Draft, foreign_name: str, values: Values) -> None:
    where, name = f"models.{foreign_name}", draft.name(foreign_name)
    left = dict(values)
    if foreign_name.startswith(CLAUDE):
        _add_claude_model(draft, name, foreign_name)
        draft.lose_unknown(f"{where}.", left, {"backend", "category", "vram_mb"}, model=name)
        return
    category = text_of(left.pop("category", None) or "llm").lower()
    kind = _CATEGORIES.get(category)
    backend = text_of(left.pop("backend", None) or ("diffusers" if kind == "image" else "llama-server"))
    runtime = _BACKENDS.get(backend)
    if kind is None or runtime is None:
        what = f'category "{category}"' if kind is None else f'backend "{backend}"'
        draft.lose(where, f"llmux doesn't know what {what} runs: give it a `runtime` by hand")
        return
    model = draft.models[name] = {"runtime": runtime}
    if (path := _take_first(left, _PATHS)) is not None:
        model["path"] = path
    elif (repo := _take_first(left, _REPOS)) is not None:
        model["source"] = {"repo": repo}
    for key in [key for key in left if key in _SAME]:
        model[_SAME[key]] = left.pop(key)
    if description := left.pop("description", None):
        draft.virtual(name, name)["description"] = text_of(description)
    if runtime == "llama_server":
        if kind == "vision":
            model["modalities"] = ["text", "image"]
            if model.get("pin") is not True:
                model.setdefault("keep_alive_s", 60)  # llmux counts it as an LLM
        _convert_llama_server(draft, name, where, left)
    draft.lose_unknown(f"{where}.", left, (), _LOST, model=name)


def _take_first(values: Values, keys: tuple[str, ...]) -> JsonValue:
    """Remove the first of these keys that has a value, and return the value."""
    return next((values.pop(key) for key in keys if values.get(key)), None)


def _convert_llama_server(draft: Draft, name: str, where: str, left: Values) -> None:
    """Convert the model's options, template and thinking; each converted key is removed from `left`."""
    model = draft.models[name]
    template = left.get("chat_template")
    if template in ("alpaca", "raw"):
        model["prompt_format"] = left.pop("chat_template")
    elif template == "chatml":
        left.pop("chat_template")  # the worker's own template, as in model-boss
    for switch in [key for key in _THINKING if key in left]:
        switched = _SWITCH_WORDS.get(text_of(left.pop(switch)).lower())
        if switched is None:
            draft.lose(f"{where}.{switch}", "expected true or false", model=name)
        else:
            draft.merge(name, name, "defaults", CHAT_TEMPLATE.enabled if switched else CHAT_TEMPLATE.disabled)
    words = []
    for key in list(left):
        option = f"--{key.replace('_', '-')}"
        own = KEY_OF_OPTION.get(option)
        if own is None or isinstance(left[key], dict | list):
            continue
        value = left.pop(key)
        if not isinstance(FLAGS[own], tuple):
            flash = {"true": "on", "false": "off"} if own == "flash_attn" else {}
            words += [option, flash.get(text_of(value), text_of(value))]
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
    Options.read(words).give(draft, name, where)


def _add_claude_model(draft: Draft, name: str, foreign_name: str) -> None:
    if name not in draft.models:
        draft.models[name] = {
            "runtime": "claude_cli",
            "upstream_model": foreign_name.removeprefix(CLAUDE),
            "allow_remote": True,
        }
        draft.look(f"models.{foreign_name}", "answers whoever names it, as before: allow_remote", model=name)


def _convert_task(draft: Draft, foreign_name: str, values: Values) -> None:
    where, name = f"tasks.{foreign_name}", draft.name(foreign_name)
    candidates: list[JsonValue] = []
    for entry in list_of(values.get("candidates")):
        target = text_of(object_of(entry).get("model") if isinstance(entry, dict) else entry)
        if target.startswith(CLAUDE):
            _add_claude_model(draft, draft.name(target), target)
        model = draft.name(target)
        candidates.append({**entry, "model": model} if isinstance(entry, dict) else model)
    draft.tasks[name] = {key: item for key, item in values.items() if key in _TASK} | {"candidates": candidates}
    draft.lose_unknown(f"{where}.", values, _TASK)
