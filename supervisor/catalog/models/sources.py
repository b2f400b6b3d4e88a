"""The paths of files from a hub: `llmux pull` puts a model's files there, so its `path` may be left out.

    <models_dir>/<owner>/<name>/                    the files, as they lie in the repository
    <models_dir>/<owner>/<name>/<first of `files`>  `path`, where that is a model by itself; else it is the folder

A file is a model by itself in the formats of llama.cpp (GGUF) and whisper.cpp (ggml-NAME.bin). A GGUF file among `files` with
"mmproj" in its name is a model's `mmproj`, likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from runtimes.model_config import ModelConfig, Source
from supervisor.catalog.document.document import Leaf, Node, Table, plain, tree_of
from supervisor.core.types import ModelId

MODEL_FILES: Final = ("path", "model", "mmproj", "draft_model", "lora", "speculative_model")
_FETCHED: Final = ("path", "mmproj")
_GGML = re.compile(r"(?:[^*?\[]*/)?ggml-[^/*?\[]+\.bin", re.IGNORECASE)
_CACHED = re.compile(r"models--(\w[\w.-]*?)--(\w[\w.-]*)")
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_NAME = re.compile(
    r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://)?(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*(?<!\.gguf))"
    r"(?::(?P<quantisation>[\w.-]+)|/(?:(?:resolve|blob)/main/)?(?P<file>[^/\s]+\.gguf))?/?"
)


def source_paths(model: Table, models_dir: Path) -> Mapping[str, Node]:
    """The paths that follow from the model's `source`; none without a valid one. The model's own keys win."""
    source = plain(model.entries["source"]) if "source" in model.entries else None
    if not isinstance(source, dict) or not isinstance(repo := source.get("repo"), str):
        return {}
    files = source.get("files")
    names = [name for name in files if isinstance(name, str)] if isinstance(files, list) else []
    folder, place = models_dir / repo, model.entries["source"].place
    paths = {"path": folder}
    if names and _is_model_file(names[0]):
        paths["path"] = folder / names[0]
    projectors = [name for name in names if _is_gguf_file(name) and "mmproj" in name.lower()]
    if projectors:
        paths["mmproj"] = folder / projectors[0]
    return {key: Leaf(str(path), place) for key, path in paths.items()}


def with_source(model: Table, config: type[ModelConfig]) -> Table:
    """The model with the `source` that one of its short keys stands for, unless it has a `source`."""
    found = None if "source" in model.entries else config.source_of({k: plain(v) for k, v in model.entries.items()})
    if found is None:
        return model
    entry = tree_of(found.model_dump(exclude_defaults=True), model.place)
    return replace(model, entries={**model.entries, "source": entry})


def folder(source: Source, config: ModelConfig, models_dir: Path) -> Path:
    """The folder for the repository's files, in which the model finds them by its `path`."""
    path = getattr(config, "path", None)
    if not isinstance(path, Path):
        return models_dir / source.repo
    if not _is_model_file(path.name):
        return path
    inner = Path(source.files[0]).parts if source.files and _is_model_file(source.files[0]) else ()
    fits = inner and path.parts[-len(inner) :] == inner
    return path.parents[len(inner) - 1] if fits else path.parent


def remedy(model: ModelId, config: ModelConfig) -> str:
    """The remedy to add to a problem with missing files that can be fetched; "" for others."""
    path = getattr(config, "path", None)
    missing = config.source is not None and isinstance(path, Path) and not path.exists()
    return f"; get it: llmux pull {model}" if missing else ""


def hub_id(config: ModelConfig, models_dir: Path) -> str | None:
    """The model's name on the hub: the repository of its `source`, a `model` of that form, or the repository of its `path`."""
    if config.source is not None:
        return config.source.repo
    model, path = getattr(config, "model", None), getattr(config, "path", None)
    if isinstance(model, str) and _REPO.fullmatch(model):
        return model
    return _repo_at(path, models_dir) if isinstance(path, Path) else None


def _repo_at(path: Path, models_dir: Path) -> str | None:
    """The repository of the files at `path`: `<models_dir>/<owner>/<name>`, or `models--<owner>--<name>` in the hub's cache."""
    if (cached := next(filter(None, map(_CACHED.fullmatch, path.parts)), None)) is not None:
        return f"{cached[1]}/{cached[2]}"
    folder = path.parent if _is_model_file(path.name) else path
    below = folder.relative_to(models_dir).parts if folder.is_relative_to(models_dir) else ()
    repo = "/".join(below[:2])
    return repo if _REPO.fullmatch(repo) else None


def is_missing(config: ModelConfig, problem: str = "path") -> bool:
    """Whether fetching the model's source would solve this problem, which begins with its key."""
    return config.source is not None and problem.startswith(_FETCHED)


def files_of(config: ModelConfig) -> Iterator[tuple[str, Path]]:
    """The files and folders that a worker loads, with their keys. Names on a hub are left out."""
    for key in MODEL_FILES:
        value = getattr(config, key, None)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Path) or (isinstance(each, str) and each.startswith(("/", "."))):
                yield key, Path(each)


def hub_name(model: Table) -> str:
    """The advice to add to a problem with a `path` that looks like a name on the model hub; "" where it doesn't."""
    path = model.entries.get("path")
    found = _HUB_NAME.fullmatch(path.value) if isinstance(path, Leaf) and isinstance(path.value, str) else None
    if found is None or (path is not None and (path.place.source.directory / found["owner"]).exists()):
        return ""
    files = f", files: [{found['file'] or 'FILE.gguf'}]" if found["file"] or found["quantisation"] else ""
    return f"; if that is a name on the model hub, write source: {{repo: {found['owner']}/{found['name']}{files}}}"


def _is_model_file(name: str) -> bool:
    return _is_gguf_file(name) or _GGML.fullmatch(name) is not None


def _is_gguf_file(name: str) -> bool:
    return name.lower().endswith(".gguf") and not any(letter in name for letter in "*?[")
