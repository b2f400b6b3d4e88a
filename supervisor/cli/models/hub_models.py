"""The parts of a hub's repository that llmux can run: its quantisations, the memory of each, and the entry of a model.

A repository of GGUF files has one model in several quantisations. Their headers are alike, so the first MiB of one file shows
how much memory each takes. A repository of safetensors is one model, whose config.json tells the runtime.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from runtimes.estimate import MIB
from runtimes.model_config import Source
from runtimes.registry import REGISTRY
from supervisor.catalog.models.local_models import GGUF, Entry, purpose, quantisation, runtime_of
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.host.hub import hub
from supervisor.host.hub.download import File

HEADER_BYTES: Final = 1 << 20
WITHOUT_HEADER: Final = 1.2  # memory relative to the files' size, without a header
PLAIN_WEIGHTS: Final = ("BF16", "F16", "F32", "FP16", "FP32")
"""Not quantised: at least twice the size of Q8_0, and half its speed, for a difference that can't be noticed."""

_REFERENCE = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<quantisation>[\w.-]+))?", re.ASCII)
_PAGE = re.compile(r"(?P<repo>[^/]+/[^/]+)/(?:blob|resolve|tree)/(?P<revision>[^/]+)(?:/(?P<file>.+))?")
_HOSTS: Final = ("hf.co", "huggingface.co")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_TAG: Final = re.compile(r"(?P<size>[^-]+)(?:-(?:instruct|it|chat))?(?:-(?P<quantisation>q\w+|fp16|f16|bf16))?")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model that a person named. `quantisation`: a quantisation's or a file's name; None: the best that fits."""

    repo: str
    quantisation: str | None = None
    revision: str = "main"
    name: str | None = None  # its well-known name, which clients will use

    def reference(self, variant: Variant) -> str:
        """The reference that names exactly this variant."""
        if self.revision == "main":
            return f"{self.repo}:{variant.label}"
        return f"https://{_HOSTS[1]}/{self.repo}/blob/{self.revision}/{variant.files[0].name}"

    def source(self, files: Sequence[str]) -> Entry:
        """The key `source` of an entry with these files; without files `llmux pull` chooses them."""
        revision: Entry = {} if self.revision == "main" else {"revision": self.revision}
        return {"repo": self.repo, **revision, **({"files": list(files)} if files else {})}


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a repository's model. `need_mib`: the memory it takes; `detail` explains that figure."""

    label: str
    files: tuple[File, ...]  # the first one is loaded
    entry: Entry = field(default_factory=dict)
    need_mib: int = 0
    detail: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def is_called(self, word: str) -> bool:
        """Whether this word names the variant: by its quantisation or its first file."""
        return word.lower() == self.label.lower() or is_named(self.files[0].name, word)


def reference(text: str) -> Reference | None:
    """`ORG/REPO`, `ORG/REPO:QUANT`, the same behind `hf://` or a hub's host, the URL of a page of the hub, or a well-known name.

    None: the text is none of these, perhaps a model's name. Raises InvalidRequestError for any other URL.
    """
    if (known := _well_known_reference(text)) is not None:
        return known
    scheme, separator, rest = text.partition("://")
    if separator and scheme.lower() in {"http", "https"}:
        host, _, path = re.split(r"[?#]", rest)[0].partition("/")
        if host not in _hub_hosts():
            raise InvalidRequestError(
                f"{text} is no page of the hub ({', '.join(_hub_hosts())}); HF_ENDPOINT names another."
            )
        rest = unquote(path).strip("/")
    elif separator:
        rest = rest.strip("/") if scheme.lower() == "hf" else ""
    else:
        host, _, path = text.partition("/")
        rest = path if host in _hub_hosts() else text
    if (page := _PAGE.fullmatch(rest)) is not None and _REFERENCE.fullmatch(page["repo"]):
        return Reference(page["repo"], page["file"], page["revision"])
    found = _REFERENCE.fullmatch(rest)
    if found is None and separator:
        raise InvalidRequestError(f"{text} names no model of the hub, such as hf://ORG/REPO or hf://ORG/REPO:Q4_K_M.")
    return Reference(found["repo"], found["quantisation"]) if found is not None else None


def _well_known_names() -> dict[str, str]:
    """Well-known name → repository."""
    lines = Path(__file__).with_name("hub_names.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(maxsplit=1) for line in lines if not line.startswith("#"))


def sizes(name: str) -> list[str]:
    """The well-known names of this family, of all tags."""
    names = list(_well_known_names())
    own = name.lower().partition(":")[0]
    return [one for one in names if one.partition(":")[0] == own]


def _well_known_reference(text: str) -> Reference | None:
    """`llama3.2`, `llama3.2:latest`, `llama3.2:1b`, `llama3.2:1b-instruct-q8_0`; None: no such name."""
    family, _, tag = text.lower().partition(":")
    of_family, names = sizes(family), _well_known_names()
    if tag in ("", "latest"):
        return Reference(names[of_family[0]], name=family) if of_family else None
    found = _TAG.fullmatch(tag)
    repo = names.get(f"{family}:{found['size']}") if found is not None else None
    return Reference(repo, found["quantisation"], name=text.lower()) if found is not None and repo is not None else None


def _hub_hosts() -> tuple[str, ...]:
    return tuple(dict.fromkeys((urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc or _HOSTS[1], *_HOSTS)))


def variants(wanted: Reference) -> list[Variant]:
    """The variants of a repository, the largest first. Blocks on the hub.

    Raises HubError, or NotFoundError where llmux can run nothing in the repository.
    """
    listing = hub.look(Source(repo=wanted.repo, revision=wanted.revision, files=["*"]))
    projector = _projector(listing)
    groups: dict[str, list[File]] = {}
    for file in sorted(filter(lambda file: _is_model(file.name), listing.files), key=lambda file: file.name):
        groups.setdefault(_PART.sub("", file.name[: -len(GGUF)]), []).append(file)
    groups = {stem: files for stem, files in groups.items() if _is_whole(files)}
    if not groups:
        return [_safetensors_variant(wanted, listing)]
    beside = () if projector is None else (projector,)
    labels = _variant_labels(groups)
    found = [Variant(labels[stem], (*files, *beside)) for stem, files in groups.items()]
    return sorted(_with_memory(wanted, listing, found), key=lambda variant: -variant.size_bytes)


def name_of(repo: str) -> str:
    """A name for clients: `bartowski/Qwen3-8B-GGUF` → `qwen3-8b`."""
    return re.sub(r"[-_.]gguf$", "", repo.rpartition("/")[2], flags=re.IGNORECASE).lower()


def is_named(file: str, word: str) -> bool:
    """Whether the word names this file, or its quantisation."""
    stem = _PART.sub("", re.sub(r"\.gguf$", "", file, flags=re.IGNORECASE))
    return word.lower() in {file.lower(), Path(file).name.lower(), quantisation(stem).lower()}


def _is_model(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(GGUF) and "mmproj" not in lower and "imatrix" not in lower


def _is_whole(files: Sequence[File]) -> bool:
    """Whether all parts exist. The names of the parts have their number."""
    found = _PART.search(files[0].name[: -len(GGUF)])
    return found is None or int(found[1]) == len(files)


def _projector(listing: hub.Listing) -> File | None:
    """The multimodal projector; of several files the one in F16, which every device computes."""
    found = [file for file in listing.files if file.name.lower().endswith(GGUF) and "mmproj" in file.name.lower()]
    order = {"F16": 0, "BF16": 1, "Q8_0": 2}
    return min(found, key=lambda file: (order.get(quantisation(file.name[: -len(GGUF)]), 3), file.name), default=None)


def _variant_labels(stems: Sequence[str] | dict[str, list[File]]) -> dict[str, str]:
    """Stem → label: the quantisation, or the file's name where the quantisation is unknown or not unique."""
    labels = [quantisation(stem) for stem in stems]
    return {
        stem: label if label and labels.count(label) == 1 else stem.rpartition("/")[2]
        for stem, label in zip(stems, labels, strict=True)
    }


def _with_memory(wanted: Reference, listing: hub.Listing, found: Sequence[Variant]) -> Iterator[Variant]:
    """The variants with entry and memory. The estimate reads the header from a sparse file of the real file's length."""
    adapter = REGISTRY.get("llama_server")
    start = hub.head(listing, min((variant.files[0] for variant in found), key=lambda file: file.size), HEADER_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"header{GGUF}"
        path.write_bytes(start)
        about = purpose(path)
        for variant in found:
            weights = [file for file in variant.files if "mmproj" not in file.name.lower()]
            size = sum(file.size for file in weights)
            os.truncate(path, size)
            config = adapter.config.model_validate({"runtime": adapter.name, "path": path, **about})
            estimate = adapter.estimate(config)
            if estimate is None:
                need, detail = int(variant.size_bytes * WITHOUT_HEADER), "its files' size"
            else:
                beside = 2 * (variant.size_bytes - size)  # the projector's weights, and as much for its buffers
                need, detail = estimate.mib * MIB + beside, estimate.detail
            entry: Entry = {**about, "source": wanted.source([file.name for file in variant.files])}
            yield Variant(variant.label, variant.files, entry, -(-need // MIB), detail)


def _safetensors_variant(wanted: Reference, listing: hub.Listing) -> Variant:
    """A repository of safetensors, as one variant. Raises NotFoundError where no runtime is known to run it."""
    there = {file.name: file for file in listing.files}
    weights = tuple(file for file in listing.files if file.name.endswith(".safetensors") and "/" not in file.name)
    architectures: list[str] = []
    if weights and "config.json" in there:
        try:
            described = json.loads(hub.content(listing, there["config.json"]))
        except (ValueError, RecursionError) as error:
            raise NotFoundError(
                f"{wanted.repo}: its config.json can't be read ({error}). Look for another one."
            ) from error
        named = described.get("architectures") if isinstance(described, dict) else None
        architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    about = runtime_of(architectures, there)
    if about is None:
        what = f"its config.json names {', '.join(architectures)}" if architectures else "it has no whole model in GGUF"
        raise NotFoundError(
            f"{wanted.repo}: {what}. llmux can't enter it by itself: look for a repository with GGUF files, or write "
            "an entry; llmux config example shows one for each runtime."
        )
    need = -(-int(sum(file.size for file in weights) * WITHOUT_HEADER) // MIB)
    return Variant("safetensors", weights, {**about, "source": wanted.source(())}, need, "its files' size")
