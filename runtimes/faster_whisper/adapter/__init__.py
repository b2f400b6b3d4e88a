"""Whisper models on CTranslate2, with faster-whisper: several times as fast as transformers, on CPUs and NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import ctranslate2_models, speech_recognition, whisper_sizes
from runtimes.adapters.ctranslate2_models import ComputeType, ModelFile
from runtimes.adapters.speech_recognition import MAX_AUDIO_S, DefaultLanguage, MaxAudio, WhisperAdapter
from runtimes.adapters.whisper_sizes import Size
from runtimes.adapters.worker_adapter import ModelPath, ParallelConfig
from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality, Source

PROGRAM_MIB: Final = 135  # interpreter, CTranslate2, ONNX Runtime, PyAV, and the spectrum of a short file
POSITIONS, TOKENS, HEAD = 1500, 448, 64


class FasterWhisperConfig(ParallelConfig):
    """A Whisper model converted for CTranslate2."""

    type: Literal["asr"] = Field(default="asr", description="What the model is for: speech recognition.")
    modalities: list[Modality] = Field(default=["audio"], description="What the model takes as input.")
    path: ModelPath = Field(description="The model's folder: model.bin, config.json, tokenizer.json.")
    model: Size | None = Field(
        default=None,
        description="Its size instead of its path: `llmux pull` gets the files, to below `server.models_dir`. `large` is "
        "large-v3, `turbo` large-v3-turbo.",
        examples=["small"],
    )
    compute_type: ComputeType = Field(
        default="default",
        description="Type that weights are computed in; default: as they are stored, auto: the fastest there is.",
    )
    beam_size: int = Field(default=5, ge=1, le=20, description="Beams of the search; fewer are faster.")
    vad: bool = Field(default=False, description="Leave out what holds no speech, found by a small model beforehand.")
    default_language: DefaultLanguage = None
    max_audio_s: MaxAudio = MAX_AUDIO_S

    @classmethod
    def source_of(cls, values: Mapping[str, object]) -> Source | None:
        """The repository with the model of this size."""
        size = values.get("model")
        return whisper_sizes.converted(size) if isinstance(size, str) and size in whisper_sizes.SIZES else None


class FasterWhisperAdapter(WhisperAdapter[FasterWhisperConfig]):
    """One process per model."""

    name = "faster_whisper"
    summary = "Speech recognition: Whisper models on CTranslate2."
    requirements = Path(__file__).parents[1] / "requirements.lock"
    config = FasterWhisperConfig
    overridable_keys = ("compute_type", "beam_size", "vad", "parallel", "threads", "default_language", "max_audio_s")
    program = "runtimes.faster_whisper.worker"

    def problems(self, config: FasterWhisperConfig) -> Iterator[str]:
        """Problems: a folder without a Whisper model, an unknown language."""
        yield from _path_problems(config.path)
        yield from speech_recognition.problems(config.default_language)

    def options(self, config: FasterWhisperConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError without a model."""
        return {
            "path": str(config.path),
            "device": context.device.kind.accelerator,
            "compute_type": config.compute_type,
            "threads": config.threads,
            "beam_size": config.beam_size,
            "vad": config.vad,
            **speech_recognition.options(config.default_language, config.max_audio_s),
        }

    def launch(self, config: FasterWhisperConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        return ctranslate2_models.with_cuda(super().launch(config, context), context, self.name)

    def estimate(self, config: FasterWhisperConfig) -> Estimate | None:
        """From the variables listed in model.bin; None if it can't be read."""
        try:
            return _footprint(config, ctranslate2_models.read(config.path))
        except ModelUnusableError:
            return None


def _path_problems(path: Path) -> Iterator[str]:
    try:
        model = ctranslate2_models.read(path)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    if model.specification != "WhisperSpec":
        yield f"path: {path} holds a {model.specification.removesuffix('Spec')} model; this runtime serves Whisper"
    if not (path / "tokenizer.json").is_file():
        # without it faster-whisper would download one
        yield f"path: there is no tokenizer.json in {path}; copy it from the model it was converted from"


def _footprint(config: FasterWhisperConfig, model: ModelFile) -> Estimate:
    """The memory of a faster-whisper worker: weights + activations of one window of 30 s + the program.

    - weights: the width of a value depends on `compute_type`; quantised ones keep their scales.
    - encoder: 1500 positions of the widest layer's activations, and the scores of its attention (64 values a head).
    - decoder: keys and values of the encoder's output and of the text so far, for each beam.

    Long files briefly take another megabyte of host memory for each second of a piece, of at most two minutes.
    """
    width = ctranslate2_models.value_bytes(config.compute_type, model, config.devices)
    weights = model.bytes_as(width)
    size, inner = _widths(model)
    activation = 4 if width in (1, 4) else 2
    encoder = POSITIONS * (4 * size + 2 * inner + POSITIONS * max(1, size // HEAD)) * activation
    kept = model.layers("decoder") * 2 * size * activation * (POSITIONS + TOKENS * config.beam_size)
    work = config.parallel * (encoder + kept)
    return Estimate.of({"weights": weights, "work": work, "program": PROGRAM_MIB * MIB})


def _widths(model: ModelFile) -> tuple[int, int]:
    """The width of the residual stream, and of the widest layer."""
    size = next((shape[0] for name, shape in model.shapes.items() if name == "encoder/conv1/weight"), 0)
    inner = max((shape[0] for name, shape in model.shapes.items() if "/ffn/linear_0/weight" in name), default=4 * size)
    return size, inner
