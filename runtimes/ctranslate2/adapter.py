"""Language models (generators) and translation models (with an encoder) on CTranslate2, on CPUs and NVIDIA GPUs.

Single turns of text. model.bin shows which of the two a folder has. config.json doesn't contain the context, so the context
is a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import chat_workers, checkpoints, ctranslate2_models
from runtimes.adapters.ctranslate2_models import ComputeType, ModelFile
from runtimes.adapters.worker_adapter import ModelPath, ParallelConfig, WorkerAdapter
from runtimes.base import Capabilities, LaunchContext, LaunchSpec, ModelUnusableError, Thinking
from runtimes.ctranslate2.shared.language_tokens import BEFORE_SOURCE, BEGINNING
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality

PROGRAM_MIB: Final = 66  # interpreter, CTranslate2, tokenizers and SentencePiece without a model
KINDS: Final = {"TransformerDecoderSpec": "generator", "TransformerSpec": "translator"}
MAX_CONTEXT: Final = {"generator": 4096, "translator": 512}  # unless configured, or the model has fewer positions
TOKENIZERS: Final = ("tokenizer.json", "source.spm", "*.model")
HALVES: Final = ("float16", "bfloat16", "int8_float16", "int8_bfloat16")


class CTranslate2Config(ParallelConfig):
    """A language or translation model converted for CTranslate2."""

    type: Literal["llm"] = Field(default="llm", description="What the model is for: texts.")
    modalities: list[Literal["text"]] = Field(  # type: ignore[assignment]  # narrower: there are no others
        default=["text"], description="What the model takes as input."
    )
    path: ModelPath = Field(
        description="The model's folder: model.bin, config.json, its vocabulary, and the tokenizer's files copied beside."
    )
    compute_type: ComputeType = Field(
        default="int8",
        description="Type that weights are computed in; default: as they are stored, auto: the fastest there is.",
    )
    beam_size: int = Field(
        default=1,
        ge=1,
        le=20,
        description="Beams of the search, unless a request says otherwise. 1: tokens come one by one, and may be sampled; more: the answer comes whole.",
    )
    n_ctx: int | None = Field(
        default=None,
        ge=16,
        description="Context in tokens: of prompt and answer together, of a translation's source and of its target. Default: the "
        "model's positions where it has a table of them, at most 4096; else 4096, for translation models 512.",
    )


class CTranslate2Adapter(WorkerAdapter[CTranslate2Config]):
    """One process per model."""

    name = "ctranslate2"
    summary = "Language and translation models on CTranslate2: single turns of text, beam search."
    all_endpoints = chat_workers.ENDPOINTS
    requirements = Path(__file__).parent / "requirements.lock"
    config = CTranslate2Config
    overridable_keys = ("compute_type", "beam_size", "n_ctx", "parallel", "threads")
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "top_k": ("top_k",),
        "repetition_penalty": ("repetition_penalty",),
        "beam_size": ("beam_size",),
    }
    program = "runtimes.ctranslate2.worker"

    def problems(self, config: CTranslate2Config) -> Iterator[str]:
        """Problems: a folder without such a model, or without a tokenizer."""
        return _problems(config)

    def options(self, config: CTranslate2Config, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError without a model."""
        model = ctranslate2_models.read(config.path)
        return {
            "path": str(config.path),
            "kind": KINDS[model.specification],
            "device": context.device.kind.accelerator,
            "compute_type": config.compute_type,
            "threads": config.threads,
            "n_ctx": _context(config, model),
            "beam_size": config.beam_size,
            "chat_template": checkpoints.chat_template(config.path) or "",
        }

    def launch(self, config: CTranslate2Config, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        return ctranslate2_models.with_cuda(super().launch(config, context), context, self.name)

    def estimate(self, config: CTranslate2Config) -> Estimate | None:
        """From the variables listed in model.bin; None if it can't be read."""
        try:
            model = ctranslate2_models.read(config.path)
        except ModelUnusableError:
            return None
        return _footprint(config, model) if model.specification in KINDS else None

    def weights(self, config: CTranslate2Config) -> tuple[Path, ...]:
        """The one weight file, model.bin."""
        return (config.path / ctranslate2_models.NAME,)

    def inputs(self, config: CTranslate2Config) -> frozenset[Modality]:
        """The model takes text only."""
        return frozenset({"text"})

    def capabilities(self, config: CTranslate2Config) -> Capabilities:
        """Single turns, without tools."""
        try:
            model = ctranslate2_models.read(config.path)
        except ModelUnusableError:
            return Capabilities(("text",), tools=False, multi_turn=False)
        template = self.chat_template(config) or ""
        return Capabilities(
            modalities=("text",),
            tools=False,
            thinking=chat_workers.thinks(template),
            multi_turn=False,
            context=_context(config, model),
            translates=KINDS.get(model.specification) == "translator" and _names_languages(config.path),
        )

    def chat_template(self, config: CTranslate2Config) -> str | None:
        """The chat template in the model's folder."""
        return checkpoints.template_in(config.path)

    def thinking(self, config: CTranslate2Config) -> Thinking | None:
        """Thinking is switched by an argument of the chat template, if the template has it."""
        return chat_workers.thinking(self.chat_template(config))


def _problems(config: CTranslate2Config) -> Iterator[str]:
    path = config.path
    try:
        model = ctranslate2_models.read(path)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    if model.specification == "WhisperSpec":
        yield f"path: {path} holds a Whisper model; use runtime faster_whisper"
    elif model.specification not in KINDS:
        name = model.specification.removesuffix("Spec")
        yield f"path: {path} holds a {name} model; this runtime serves language and translation models"
    if not any(True for name in TOKENIZERS for _ in path.glob(name)):
        yield (
            f"path: there is no tokenizer in {path}; copy tokenizer.json, or the SentencePiece models, from the model it was"
            " converted from (ct2-transformers-converter --copy_files)"
        )
    positions = _positions(model)
    if config.n_ctx is not None and positions is not None and config.n_ctx > positions:
        yield f"n_ctx: the model was made for {positions} tokens at most"


def _names_languages(folder: Path) -> bool:
    for name in ("source_vocabulary", "shared_vocabulary"):
        for file in (folder / f"{name}.json", folder / f"{name}.txt"):
            if file.is_file():
                tokens = re.findall(r'[^\s",]+', file.read_text(encoding="utf-8", errors="replace"))
                return any(BEGINNING.fullmatch(token) or BEFORE_SOURCE.fullmatch(token) for token in tokens)
    return False


def _positions(model: ModelFile) -> int | None:
    """The length of the model's position table; None: the model computes positions."""
    tables = (shape for name, shape in model.shapes.items() if name.endswith("position_encodings/encodings"))
    return min((shape[0] for shape in tables), default=None)


def _context(config: CTranslate2Config, model: ModelFile) -> int:
    kind = KINDS.get(model.specification, "generator")
    usual = MAX_CONTEXT[kind]
    return config.n_ctx or min(_positions(model) or usual, MAX_CONTEXT["generator"])


def _footprint(config: CTranslate2Config, model: ModelFile) -> Estimate:
    """The memory of a worker: weights + caches of `parallel` requests + the work on one prompt + the program.

    - weights: the width of a value depends on `compute_type`; quantised ones keep their scales.
    - cache: keys and values of each layer of the decoder for the context and each beam, in the type that isn't quantised; a
      step copies one layer's. A translation model also keeps those of its source.
    - work: CTranslate2 reads a prompt in one step. Its attention has a score for each pair of tokens and each head.
    """
    width = ctranslate2_models.value_bytes(config.compute_type, model, config.devices)
    kept = 2 if config.compute_type in HALVES and width != 4 else 4
    context = _context(config, model)
    queries, keys = _attention_sizes(model)
    layers, size, inner = model.layers("decoder"), _residual_width(model), _widest_layer(model)
    sides = 1 if KINDS[model.specification] == "generator" else 2
    cache = (layers + 1) * 2 * keys * kept * context * config.beam_size * sides
    work = context * (3 * size + queries + 2 * keys + 2 * inner + context * max(1, queries // _HEAD)) * kept
    return Estimate.of(
        {
            "weights": model.bytes_as(width),
            "KV cache": cache * config.parallel,
            "work": work * config.parallel,
            "program": PROGRAM_MIB * MIB,
        },
        f"{KINDS[model.specification]}, {config.parallel} requests of {context} tokens",
    )


_HEAD: Final = 64  # values of a head, as in nearly all models; the file doesn't tell


def _attention_sizes(model: ModelFile) -> tuple[int, int]:
    """For one token in one layer: the number of values in all queries, and in all keys."""
    place = "decoder/layer_0/self_attention"
    queries = model.shapes.get(f"{place}/linear_1/weight", (0, 0))[-1]
    fused = model.shapes.get(f"{place}/linear_0/weight", (3 * queries,))[0]
    return queries, max(0, fused - queries) // 2


def _residual_width(model: ModelFile) -> int:
    return model.shapes.get("decoder/layer_0/self_attention/linear_1/weight", (0,))[0]


def _widest_layer(model: ModelFile) -> int:
    return max((shape[0] for name, shape in model.shapes.items() if "/ffn/linear_0/weight" in name), default=0)
