"""Finds models on this machine's disk, in a file or a folder, and makes a configuration entry for each.

A GGUF file is a model; a split model is its first part; a projector (`mmproj`) belongs to the models beside it. A folder with
config.json and weights is a model in Hugging Face's layout; its architecture determines the runtime.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.adapters import checkpoints
from runtimes.base import ModelUnusableError
from runtimes.llama_server.adapter import gguf_meta
from supervisor.errors import NotFoundError

GGUF: Final = ".gguf"
PIPELINE: Final = "model_index.json"
CONFIG: Final = "config.json"
MOST_FOLDERS: Final = 20_000
PROJECTOR: Final = "clip"

_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_UNFIT: Final = re.compile(r"[^a-z0-9._-]+")
_IN_CACHE: Final = re.compile(r"(?:^|.*/)models--(?P<name>[^/]+)/snapshots/[^/]+(?P<rest>/.*)?")  # of the hub
_WEIGHTS: Final = re.compile(r"(?:(?!adapter_|consolidated).*\.safetensors|pytorch_model.*\.bin)")
_MEANINGLESS: Final = re.compile(
    r"|models?|hub|snapshots|workspace|out(?:put)?|merged?|checkpoints?|hf|[0-9a-f]{40}|.{1,2}"
)
"""Meaningless names that converters write into files by default, mostly the folder's."""
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|BF16|F16|F32|FP16|FP32|[MN][XV]FP4(?:_MOE)?))$",
    re.IGNORECASE,
)
_POOLED: Final = (1, 2, 3)  # GGUF's pooling types of embedding models: mean, cls, last
_RANKS: Final = 4

Entry = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model. `names`: for clients, the best first. `about`: keys that its files imply."""

    names: tuple[str, ...]
    path: Path
    projector: Path | None = None
    about: Entry = field(default_factory=dict)

    @property
    def entry(self) -> Entry:
        """The model's entry in a configuration."""
        projector: Entry = {"mmproj": str(self.projector)} if self.projector is not None else {}
        return {**self.about, "path": str(self.path), **projector}

    def name(self, taken: Container[str]) -> str:
        """The best free name; if all are taken, one with a number."""
        numbered = (f"{self.names[-1]}-{number}" for number in count(2))
        return next(name for name in chain(self.names, numbered) if name not in taken)

    def name_below(self, base: Path) -> str:
        """The model's path below this folder, or its name on the hub if it lies in the hub's cache."""
        name = base.name if self.path == base else _PART.sub("", self.path.relative_to(base).as_posix())
        name = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
        if (cached := _IN_CACHE.fullmatch(name)) is not None:
            name = cached["name"].replace("--", "/") + (cached["rest"] or "")
        return re.sub(r"\s+", "-", name)


def by_age(models: Iterable[LocalModel]) -> list[LocalModel]:
    """The models, the oldest on this disk first: so a later file never takes over a name. Blocks on files."""

    def since(model: LocalModel) -> int:
        try:
            return model.path.stat().st_ctime_ns
        except OSError:  # it has just gone
            return 0

    return sorted(models, key=since)


def is_path(word: str) -> bool:
    """Whether this argument is a file or folder, not a name."""
    if word.lower().endswith(GGUF):  # so may the address of a page on a hub
        return "/" not in word or word.startswith("~") or ("://" not in word and Path(word).exists()) or word[0] in "/."
    return word.startswith(("/", "./", "../", "~")) or ("/" not in word and Path(word).is_dir())


def find(place: Path) -> tuple[list[LocalModel], list[str]]:
    """The models of a file or folder, in the order of their paths, and a line for each unusable model. Blocks on files.

    Raises NotFoundError if there is no such file or folder, or no model in it.
    """
    place = Path(os.path.abspath(place.expanduser()))  # noqa: PTH100  # links stay as they are named
    if not os.path.exists(place):  # noqa: PTH110  # also where that can't be seen
        raise NotFoundError(f"{place}: there is no such file or folder.")
    alone = not place.is_dir()
    if alone and place.suffix.lower() != GGUF:
        folder = f"; its folder is a model: {place.parent}" if (place.parent / CONFIG).exists() else ""
        raise NotFoundError(f"{place} is no GGUF file{folder}.")
    unread: list[str] = []
    files = list(candidates(place.parent, deep=False) if alone else candidates(place, unread))
    found, problems = _gguf_models(
        [file for file in files if file.suffix.lower() == GGUF], _first_part(place) if alone else None
    )
    problems += unread
    if not alone:
        indexes = {file.parent: file.name for file in files if file.name in (CONFIG, PIPELINE)}
        for model, index in indexes.items():
            try:
                found.append(_folder_model(model, index))
            except (ModelUnusableError, OSError) as error:
                problems.append(_error_text(error))
    if not found and not problems:
        raise NotFoundError(
            f"{place} has no model in it (GGUF files, Hugging Face folders); one of the hub: llmux add ORG/REPO-GGUF"
        )
    return sorted(found, key=lambda model: model.path), problems


def candidates(folder: Path, unread: list[str] | None = None, *, deep: bool = True) -> Iterator[Path]:
    """The files that determine the models of a folder: GGUF files, and config.json and weights of model folders. Blocks.

    `deep`: also in subfolders, links followed, but not inside a model's folder. `unread` gets a line for each unreadable folder.
    """

    def note_error(error: OSError) -> None:
        if unread is not None:
            unread.append(_error_text(error))

    seen: set[str] = set()
    for where, below, names in os.walk(folder, onerror=note_error, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:  # a link leads back
            below.clear()
            continue
        seen.add(real)
        files = [Path(where, name) for name in sorted(names)]
        yield from (file for file in files if file.suffix.lower() == GGUF)
        weights = [file for file in files if _WEIGHTS.fullmatch(file.name)]
        index = PIPELINE if PIPELINE in names else CONFIG if CONFIG in names and weights else None
        if index is not None:
            yield from (Path(where, index), *weights)
        below[:] = (
            []
            if index is not None or not deep or len(seen) > MOST_FOLDERS
            else sorted(_folders_in_use(Path(where), below))
        )


def _folders_in_use(folder: Path, below: Sequence[str]) -> Sequence[str]:
    """The subfolders to search: in the hub's cache only the version in use, else all."""
    if folder.name != "snapshots":
        return below
    try:
        used = (folder.parent / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return below
    return [used] if used in below else below


def _gguf_models(files: Sequence[Path], wanted: Path | None) -> tuple[list[LocalModel], list[str]]:
    """The models among these files, or only `wanted`, and a line for each unusable file."""
    models: dict[Path, str] = {}
    projectors: list[Path] = []
    problems: list[str] = []
    for file in files:
        if (part := _PART.search(file.name)) is not None and int(part[1]) != 1:
            continue
        try:
            metadata = gguf_meta.read(file)
            problem = gguf_meta.cut_short(file)
        except (ModelUnusableError, OSError) as error:  # it may be deleted meanwhile
            problem = _error_text(error)
        if problem is not None:
            problems += [problem] if wanted in (None, file) else []
        elif metadata.architecture == PROJECTOR:
            projectors.append(file)
        elif metadata.values.get("general.type", "model") != "model":  # an adapter for a model
            problems += [f"{file} is no model by itself but an addition to one"] if wanted == file else []
        else:
            models[file] = str(metadata.values.get("general.name", ""))
    if wanted in projectors:
        problems.append(f"{wanted} is a projector: it gives a model eyes or ears, and is none itself")
    found = [
        LocalModel(
            _names(named, _PART.sub("", file.name).lower().removesuffix(GGUF)),
            file,
            _projector_of(file, models, projectors),
            purpose(file),
        )
        for file, named in models.items()
        if wanted in (None, file)
    ]
    return found, problems


def _folder_model(folder: Path, index: str) -> LocalModel:
    """A model in Hugging Face's layout. Raises ModelUnusableError if it is incomplete, or if its runtime is unclear."""
    cached = _IN_CACHE.fullmatch(str(folder))
    names = _names("", folder.name if cached is None else cached["name"].rpartition("--")[2])
    if index == PIPELINE:
        return LocalModel(names, folder, about={"runtime": "diffusers"})
    model = checkpoints.read(folder)
    there = {file.name for file in folder.iterdir()}
    about = runtime_of(model.config.architectures, there)
    if about is None:
        named = ", ".join(model.config.architectures) or "no architecture"
        raise ModelUnusableError(
            f"{folder}: its {CONFIG} names {named}, which tells no runtime; llmux config example shows an entry for each"
        )
    return LocalModel(names, folder, about=about)


def _error_text(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def runtime_of(architectures: Sequence[str], there: Container[str]) -> Entry | None:
    """The runtime of a folder with a model of these architectures and with these files; None if it is unclear."""
    from runtimes.embeddings.adapter import SEEING  # noqa: PLC0415  # the daemon needs it only for such folders
    from runtimes.transformers.adapter.speech import ARCHITECTURES as SPEECH  # noqa: PLC0415

    if "modules.json" in there or any(name.endswith("ForSequenceClassification") for name in architectures):
        return {"runtime": "embeddings"}
    if any(name in SEEING for name in architectures):
        return {"runtime": "embeddings", "type": "vision"}
    if any(name in SPEECH for name in architectures):
        return {"runtime": "transformers", "type": "asr"}
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        return {"runtime": "transformers"}
    return None


def purpose(path: Path) -> Entry:
    """The keys of an entry for a GGUF file's purpose; none for a language model, or an unreadable file."""
    try:
        metadata = gguf_meta.read(path)
    except ModelUnusableError:
        return {}
    pooling = metadata.values.get(f"{metadata.architecture}.pooling_type")
    if pooling == _RANKS:
        return {"type": "embedding", "rerank": True}
    return {"type": "embedding"} if pooling in _POOLED else {}


def quantisation(stem: str) -> str:
    """`Qwen3-8B-Q4_K_M` → `Q4_K_M`, from the name of the file or else of its folder; empty if neither has one."""
    for part in reversed(stem.split("/")[-2:]):
        if (found := _QUANTISATION.search(part)) is not None:
            return found[1].upper()
    return ""


def _names(declared: str, stem: str) -> tuple[str, ...]:
    """Names: from the metadata, the same with the quantisation, and the file's. Only the file's if the first is meaningless."""
    own = _slug(declared)
    file = _slug(stem) or "model"
    if _MEANINGLESS.fullmatch(own):
        return (file,)
    quant = quantisation(stem).lower()
    return tuple(dict.fromkeys((own, *([f"{own}-{quant}"] if quant else []), file)))


def _slug(text: str) -> str:
    return _UNFIT.sub("-", text.lower()).strip("-._")[:100]


def _first_part(file: Path) -> Path:
    """The first part of a split model, of which `file` may be any part."""
    return file.with_name(_PART.sub(lambda part: f"-00001-of-{part[2]}{GGUF}", file.name))


def _projector_of(model: Path, models: Collection[Path], projectors: Sequence[Path]) -> Path | None:
    """The model's projector in its folder: the only one, or the one with the most similar name. None if that is unclear."""
    beside = [one for one in projectors if one.parent == model.parent]
    if len(beside) <= 1:
        alone = sum(other.parent == model.parent for other in models) == 1
        named = [one for one in beside if _common_prefix_length(one, model) >= 4]
        return beside[0] if beside and (alone or named) else None
    best = max(beside, key=lambda one: _common_prefix_length(one, model))
    return best if _common_prefix_length(best, model) >= 4 else None


def _common_prefix_length(projector: Path, model: Path) -> int:
    """The length of the common prefix of both names, after the "mmproj" of the projector's."""
    stem = re.sub(r"^mmproj[-_.]?|[-_.]mmproj", "", projector.stem, flags=re.IGNORECASE).lower()
    return next(
        (at for at, (one, other) in enumerate(zip(stem, model.stem.lower(), strict=False)) if one != other), len(stem)
    )
