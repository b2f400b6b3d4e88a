"""Models in GGUF files on this machine's disk: what a file is, and all that a folder has.

A split model is its first part; a projector (`mmproj`) belongs to the models beside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.base import ModelUnusableError
from runtimes.embeddings.adapter import SEEING
from runtimes.llama_server.adapter import gguf_meta
from runtimes.transformers.adapter.speech import ARCHITECTURES as SPEECH
from supervisor.errors import NotFoundError

GGUF: Final = ".gguf"
MOST_FILES: Final = 20_000
PROJECTOR: Final = "clip"
_POOLED: Final = (1, 2, 3)  # gguf's pooling types of embedding models: mean, cls, last
_RANKS: Final = 4
PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_UNFIT: Final = re.compile(r"[^a-z0-9._-]+")

Entry = dict[str, JsonValue]
"""What the configuration says of a model."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model. `name` for clients is made of its file's."""

    name: str
    path: Path
    projector: Path | None = None

    @property
    def entry(self) -> dict[str, str]:
        """What the configuration says of it."""
        projector = {"mmproj": str(self.projector)} if self.projector is not None else {}
        return {"path": str(self.path), **projector}


def is_path(word: str) -> bool:
    """Does a person mean a file or folder with this, and not a name?"""
    if word.endswith(GGUF):  # the page of a hub's file ends so, too
        return "/" not in word or word.startswith("~") or ("://" not in word and Path(word).exists()) or word[0] in "/."
    return word.startswith(("/", "./", "../", "~")) or ("/" not in word and Path(word).is_dir())


def find(place: Path) -> tuple[list[LocalModel], list[str]]:
    """The models of a file or folder, and a line for each file that is none. Blocks. Raises NotFoundError where there is nothing."""
    place = Path(os.path.abspath(place.expanduser()))  # noqa: PTH100  # links stay as they are named
    if not place.exists():
        raise NotFoundError(f"{place}: there is no such file or folder.")
    alone = not place.is_dir()
    files = sorted(place.parent.glob(f"*{GGUF}")) if alone else list(_files(place))
    wanted = _first(place) if alone else None
    models: list[Path] = []
    projectors: list[Path] = []
    problems: list[str] = []
    for file in files:
        if (part := PART.search(file.name)) is not None and int(part[1]) != 1:
            continue
        try:
            kind = gguf_meta.read(file).architecture
            problem = gguf_meta.cut_short(file)
        except ModelUnusableError as error:
            kind, problem = "", str(error)
        if problem is None:
            (projectors if kind == PROJECTOR else models).append(file)
        elif wanted in (None, file):
            problems.append(problem)
    if wanted in projectors:
        problems.append(f"{wanted} is a projector: it gives a model eyes or ears, and is none itself")
    mine = [file for file in models if wanted in (None, file)]
    if not mine and not problems:
        raise NotFoundError(f"{place} has no GGUF file in it; a model of the hub: llmux add ORG/REPO-GGUF")
    return [LocalModel(_name(file), file, _projector(file, models, projectors)) for file in mine], problems


def _files(folder: Path) -> Iterator[Path]:
    for count, (where, _, names) in enumerate(os.walk(folder)):
        if count > MOST_FILES:
            return
        yield from (Path(where, name) for name in sorted(names) if name.lower().endswith(GGUF))


def _first(file: Path) -> Path:
    """The first part of a split model, of which this may be any."""
    return file.with_name(PART.sub(lambda part: f"-00001-of-{part[2]}{GGUF}", file.name))


def _name(file: Path) -> str:
    stem = PART.sub("", file.name).removesuffix(GGUF)
    return _UNFIT.sub("-", stem.lower()).strip("-._") or "model"


def _projector(model: Path, models: list[Path], projectors: list[Path]) -> Path | None:
    """The one in its folder: the only one, or the one whose name has most in common; of none where models share several."""
    beside = [one for one in projectors if one.parent == model.parent]
    if len(beside) <= 1:
        alone = sum(other.parent == model.parent for other in models) == 1
        named = [one for one in beside if _common(one, model) >= 4]
        return beside[0] if beside and (alone or named) else None
    best = max(beside, key=lambda one: _common(one, model))
    return best if _common(best, model) >= 4 else None


def _common(projector: Path, model: Path) -> int:
    """How many letters of the model's name the projector's has, behind what all projectors are called."""
    stem = re.sub(r"^mmproj[-_.]?|[-_.]mmproj", "", projector.stem, flags=re.IGNORECASE).lower()
    return next(
        (at for at, (one, other) in enumerate(zip(stem, model.stem.lower(), strict=False)) if one != other), len(stem)
    )


def purpose_of(path: Path) -> Entry:
    """What an entry says of a GGUF file's purpose: nothing of a language model."""
    try:
        metadata = gguf_meta.read(path)
    except ModelUnusableError:
        return {}
    pooling = metadata.values.get(f"{metadata.architecture}.pooling_type")
    if pooling == _RANKS:
        return {"type": "embedding", "rerank": True}
    return {"type": "embedding"} if pooling in _POOLED else {}


def runtime_of(architectures: Sequence[str], there: Container[str]) -> Entry | None:
    """The runtime of a folder with a model of these architectures; None where that isn't clear."""
    if "modules.json" in there or any(name.endswith("ForSequenceClassification") for name in architectures):
        return {"runtime": "embeddings"}
    if any(name in SEEING for name in architectures):
        return {"runtime": "embeddings", "type": "vision"}
    if any(name in SPEECH for name in architectures):
        return {"runtime": "transformers", "type": "asr"}
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        return {"runtime": "transformers"}
    return None
