"""Embeddings and reranking with sentence-transformers: a model folder becomes `/v1/embeddings`, or `/v1/rerank`.

Models of type `vision`, which turn pictures and texts into vectors of one space, run on transformers itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.worker_adapter import ModelPath, ParallelConfig, WorkerAdapter
from runtimes.base import Capabilities, Contradiction, Endpoint, LaunchContext, ModelUnusableError
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality, ModelType

PROGRAM_MIB: Final = 470  # Python, torch, transformers and sentence-transformers without a model

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Task = Literal["embed", "rerank"]

SEEING: Final = ("CLIPModel", "SiglipModel", "Siglip2Model")
"""The architectures of type `vision`. SigLIP 2 with a fixed size of pictures is a SiglipModel."""

_USUAL_WIDTH: Final = 768  # of CLIP and SigLIP: their configurations omit usual values
_EMBED: Final = frozenset({Endpoint("/v1/embeddings")})
_RERANK: Final = frozenset({Endpoint("/v1/rerank"), Endpoint("/rerank", upstream_path="/v1/rerank")})


class EmbeddingsConfig(ParallelConfig):
    """A model that turns texts into vectors, or compares a query with documents; or one that sees as well."""

    type: ModelType = Field(
        default="embedding",
        description="What the model is for; decides its default priority. `vision`: one for pictures and texts, CLIP or SigLIP.",
    )
    path: ModelPath = Field(description="The model folder.", examples=["/models/bge-m3"])
    task: Task | None = Field(
        default=None,
        description="embed: vectors. rerank: scores of a cross-encoder. Default: what the model is made for.",
    )
    dtype: Dtype = Field(default="auto", description="Type of the weights once loaded. auto: as they were saved.")
    max_batch_tokens: int = Field(
        default=8192,
        ge=128,
        le=1 << 20,
        description="Tokens, or parts of pictures, computed together, padding counted; more is faster on a GPU and takes more memory.",
    )
    truncate: bool = Field(
        default=False, description="Cut texts longer than the model takes. Default: refuse them (400)."
    )
    parallel: int = Field(
        default=32, ge=1, le=256, description="Requests the worker gets at once; their texts are computed together."
    )


class EmbeddingsAdapter(WorkerAdapter[EmbeddingsConfig]):
    """The adapter of sentence-transformers."""

    name = "embeddings"
    summary = "Embedding models, also for pictures (CLIP, SigLIP), and cross-encoders for reranking, on sentence-transformers."
    all_endpoints = _EMBED | _RERANK
    overridable_keys = ("dtype", "max_batch_tokens", "threads", "parallel", "truncate")
    program = "runtimes.embeddings.worker"
    requirements = Path(__file__).parent / "requirements.lock"
    config = EmbeddingsConfig

    def problems(self, config: EmbeddingsConfig) -> Iterator[str]:
        """Problems: a missing folder, or a model that can't do the task."""
        return _problems(config)

    def options(self, config: EmbeddingsConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError where `check` finds a problem."""
        return {
            "path": str(config.path),
            "task": "vision" if config.type == "vision" else task(config),
            "device": context.device.kind.accelerator,
            "dtype": config.dtype,
            "max_batch_tokens": config.max_batch_tokens,
            "truncate": config.truncate,
        }

    def endpoints(self, config: EmbeddingsConfig) -> frozenset[Endpoint]:
        """The endpoint of the model's task."""
        return _RERANK if task(config) == "rerank" else _EMBED

    def estimate(self, config: EmbeddingsConfig) -> Estimate | None:
        """The weights by the files' headers, the activations of a full batch, and the program."""
        try:
            folder = checkpoints.read(config.path)
        except ModelUnusableError:
            return None
        dtype = folder.config.dtype if config.dtype == "auto" else config.dtype
        value_bytes = checkpoints.VALUE_BYTES.get(dtype or "", 4)
        parts = {
            "weights": folder.weights.bytes_as(dtype),
            "activations": config.max_batch_tokens * value_bytes * max(map(_token_values, _encoders(folder.config))),
            "program": PROGRAM_MIB * MIB,
        }
        return Estimate.of(parts, f"{config.max_batch_tokens} tokens at once")

    def capabilities(self, config: EmbeddingsConfig) -> Capabilities:
        """Text input, and pictures for a vision model; the model's context."""
        modalities: tuple[Modality, ...] = ("text", "image") if config.type == "vision" else ("text",)
        return Capabilities(modalities, tools=False, thinking=False, multi_turn=False, context=_context(config.path))


def task(config: EmbeddingsConfig) -> Task:
    """The configured task, else the architecture's: a sequence classifier reranks, any other model embeds."""
    if config.type == "vision":
        return "embed"
    if config.task is not None:
        return config.task
    try:
        architectures = checkpoints.config(config.path).architectures
    except ModelUnusableError:
        return "embed"
    return "rerank" if any("ForSequenceClassification" in name for name in architectures) else "embed"


def _encoders(config: checkpoints.Config) -> Iterator[checkpoints.Config]:
    """The configuration of the model, or of its encoders for texts and for pictures."""
    yield checkpoints.Config(config.values, config.text)
    if isinstance(vision := config.values.get("vision_config"), dict):
        yield checkpoints.Config(config.values, vision)


def _token_values(config: checkpoints.Config) -> int:
    """Values that a layer keeps of each token at once."""
    width = config.width or _USUAL_WIDTH
    return 4 * width + 2 * config.number("intermediate_size", default=4 * width)


def _context(path: Path) -> int | None:
    """The smallest limit among the model, its tokenizer and sentence-transformers, as in the worker."""
    try:
        found = [checkpoints.config(path).context]
    except ModelUnusableError:
        return None
    for name, key in (("tokenizer_config.json", "model_max_length"), ("sentence_bert_config.json", "max_seq_length")):
        limit = checkpoints.json_object(path / name).get(key)
        found += [limit] if isinstance(limit, int) else []
    return min((limit for limit in found if limit is not None), default=None)


def _problems(config: EmbeddingsConfig) -> Iterator[str]:
    try:
        folder = checkpoints.read(config.path)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    vision = next((name for name in folder.config.architectures if name in SEEING), None)
    if config.type == "vision" and vision is None:
        named = ", ".join(folder.config.architectures) or "no architecture"
        yield f"type: vision is for {', '.join(SEEING)}, and {config.path} names {named}; leave type out"
    elif config.type != "vision" and vision is not None:
        yield f"type: {config.path} has a {vision}, for pictures and texts: say type: vision"
    if config.type == "vision" and config.task == "rerank":
        yield Contradiction("task: a model of type vision gives vectors and zero-shot scores; leave task out")
    labels = folder.config.values.get("id2label")
    if task(config) == "rerank" and isinstance(labels, dict) and len(labels) > 1:
        yield f"task: {config.path} tells {len(labels)} classes apart; a reranker gives one score"
