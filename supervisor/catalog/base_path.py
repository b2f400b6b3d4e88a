"""The models that lie in `server.model_base_path`: each is one of the configuration that says where its files are.

    org/name/config.json, *.safetensors                                   org/name
    org/name/file-Q4_K_M.gguf                                             org/name/file-Q4_K_M
    hub/models--org--name/snapshots/REVISION/config.json, *.safetensors   org/name, in Hugging Face's cache

What tells no runtime, and what some model has already, is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from runtimes.base import ModelUnusableError
from runtimes.installed import program
from runtimes.llama_server.adapter import gguf_meta
from supervisor.catalog.local_models import MOST_FILES, PART, Entry, find, purpose_of, runtime_of
from supervisor.catalog.runner_variables import VLLM_RUNTIME
from supervisor.errors import NotFoundError

WEIGHTS: Final = ".safetensors"
_CACHED: Final = re.compile(r"(?:^|.*/)models--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)(?P<rest>/.*)?")


def models_in(base: Path, used: Collection[Path], runtimes_dir: Path) -> Iterator[tuple[str, Entry]]:
    """Their names and entries, but for those in `used`, the files and folders of other models. Blocks on files."""
    taken = {each for path in used for each in (path, path.resolve())}

    def is_taken(path: Path) -> bool:
        real = path.resolve()  # in the hub's cache it lies elsewhere
        return not taken.isdisjoint((path, *path.parents, real, *real.parents))

    for path, entry in (*_folders(base, runtimes_dir), *_files(base)):
        if not is_taken(path) and (name := _name(path, base)) is not None:
            yield name, entry


def _files(base: Path) -> Iterator[tuple[Path, Entry]]:
    """Its GGUF files."""
    try:
        found, _ = find(base)
    except NotFoundError:
        return
    for model in found:
        try:
            kind = gguf_meta.read(model.path).values.get("general.type", "model")
        except ModelUnusableError:  # it changed
            continue
        if kind == "model":  # not an adapter for another one
            yield model.path, {**purpose_of(model.path), **model.entry}


def _folders(base: Path, runtimes_dir: Path) -> Iterator[tuple[Path, Entry]]:
    """Its folders of safetensors. Language models go to vLLM where that is installed."""
    for count, (where, folders, names) in enumerate(os.walk(base)):
        folders.sort()
        if count > MOST_FILES:
            return
        if "config.json" in names and any(name.endswith(WEIGHTS) for name in names):
            entry = runtime_of(_architectures(Path(where, "config.json")), names)
            if entry == {"runtime": "transformers"} and program(runtimes_dir / VLLM_RUNTIME) is not None:
                entry = {"runtime": VLLM_RUNTIME}
            if entry is not None:
                yield Path(where), {**entry, "path": where}


def _architectures(config: Path) -> list[str]:
    try:
        described = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    told = described.get("architectures") if isinstance(described, dict) else None
    return [name for name in told if isinstance(name, str)] if isinstance(told, list) else []


def _name(path: Path, base: Path) -> str | None:
    """Its path below the folder, or what it is called on the hub; None: an older version in the hub's cache."""
    name = base.name if path == base else PART.sub("", path.relative_to(base).as_posix())
    name = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    if (cached := _CACHED.fullmatch(name)) is not None:
        repo = next(parent for parent in path.parents if parent.name == f"models--{cached['name']}")
        try:
            newest = (repo / "refs" / "main").read_text().strip()
        except (OSError, ValueError):
            newest = cached["revision"]
        if newest != cached["revision"]:
            return None
        name = cached["name"].replace("--", "/") + (cached["rest"] or "")
    return re.sub(r"\s+", "-", name)
