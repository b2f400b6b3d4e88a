"""Speech recognition: facts from the model's folder, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.adapters import checkpoints, speech_recognition
from runtimes.base import Capabilities, LaunchContext, ModelUnusableError
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality
from runtimes.transformers.adapter.config import TransformersConfig
from runtimes.transformers.adapter.kind import Kind

PROGRAM_MIB: Final = 480  # interpreter, torch, transformers, PyAV, and the spectrum of a window
ARCHITECTURES: Final = frozenset({"WhisperForConditionalGeneration", "CohereAsrForConditionalGeneration"})
POSITIONS: Final = 1500  # of the encoder, for 30 s; CohereAsr has fewer
STEPS: Final = 224  # steps with scores kept for avg_logprob: half of the maximum


class Speech(Kind):
    """The adapter of speech recognition models: transcriptions and translations."""

    program = "runtimes.transformers.worker.transcribe"
    summary = "Speech recognition."
    all_endpoints = speech_recognition.ENDPOINTS
    keys = frozenset({"default_language", "max_audio_s"})
    overridable_keys = ("dtype", "parallel", "threads", "default_language", "max_audio_s")

    def problems(self, config: TransformersConfig) -> Iterator[str]:
        """Problems: no speech recognition model in the folder, an unknown language."""
        yield from _path_problems(config.path)
        yield from speech_recognition.problems(config.default_language)

    def target_inflight(self, config: TransformersConfig) -> int:
        """The number of recordings that a worker transcribes at once."""
        return _parallel(config) if config.target_inflight is None else config.target_inflight

    def options(self, config: TransformersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings, beside the common ones."""
        return {
            "path": str(config.path),
            "device": context.device.kind.accelerator,
            "dtype": config.dtype,
            "parallel": _parallel(config),
            **speech_recognition.options(config.default_language, config.max_audio_s),
        }

    def estimate(self, config: TransformersConfig) -> Estimate | None:
        """Weights, activations of a window, program; None if the files don't suffice."""
        try:
            folder = checkpoints.read(config.path)
        except ModelUnusableError:
            return None
        model = folder.config
        dtype = model.dtype if config.dtype == "auto" else config.dtype
        weights = folder.weights.bytes_as(dtype)
        width = checkpoints.VALUE_BYTES.get(dtype or "", 4)
        encoded = POSITIONS * model.width * 8 * width  # a layer's states and its feed-forward activations
        kept = POSITIONS * model.layers * 2 * model.width * width  # keys and values for the decoder
        work = _parallel(config) * (encoded + kept + STEPS * model.vocabulary * 4)
        return Estimate.of({"weights": weights, "work": work, "program": PROGRAM_MIB * MIB})

    def inputs(self, config: TransformersConfig) -> frozenset[Modality]:
        """The model takes audio only."""
        return frozenset({"audio"})

    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """The capabilities of every speech recognition model."""
        return speech_recognition.CAPABILITIES


def _parallel(config: TransformersConfig) -> int:
    """The configured `parallel`, else 1: one recording uses all cores."""
    return config.parallel if "parallel" in config.model_fields_set else 1


def _path_problems(path: Path) -> Iterator[str]:
    try:
        found = checkpoints.read(path).config
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    if not ARCHITECTURES & set(found.architectures):
        is_a = ", ".join(found.architectures) or found.model_type or "unknown"
        yield f"path: the model is a {is_a}; speech recognition needs one of {', '.join(sorted(ARCHITECTURES))}"
