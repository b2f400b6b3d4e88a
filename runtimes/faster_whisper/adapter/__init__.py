"""Whisper models on CTranslate2, with faster-whisper: several times as fast as transformers, on CPUs and NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.adapters import speech_recognition
from runtimes.adapters.worker_adapter import WorkerAdapter
from runtimes.base import Capabilities, Estimate, LaunchContext, LaunchSpec, Modality, ModelUnusableError
from runtimes.faster_whisper.adapter import estimate, model_file
from runtimes.faster_whisper.adapter.config import FasterWhisperConfig

CUDA_LIBRARIES: Final = ("cublas", "cudnn", "cuda_nvrtc")  # of the wheels; CTranslate2 finds them by library path only


class FasterWhisperAdapter(WorkerAdapter[FasterWhisperConfig]):
    """One process per model."""

    name = "faster_whisper"
    summary = "Speech recognition: Whisper models on CTranslate2."
    all_endpoints = speech_recognition.ENDPOINTS
    requirements = Path(__file__).parents[1] / "requirements.lock"
    config = FasterWhisperConfig
    overridable_keys = ("compute_type", "beam_size", "vad", "parallel", "threads", "default_language", "max_audio_s")
    program = "runtimes.faster_whisper.worker"

    def check(self, config: FasterWhisperConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """A folder without a Whisper model, an unknown language."""
        return (*_path_problems(config.path), *speech_recognition.problems(config.default_language))

    def options(self, config: FasterWhisperConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Raises ModelUnusableError without a model."""
        for problem in _path_problems(config.path):
            raise ModelUnusableError(problem)
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
        """Raises RuntimeNotInstalledError, or ModelUnusableError."""
        spec = super().launch(config, context)
        if not context.device.kind.accelerates:
            return spec
        packages = (context.environment(self.name) / "lib").glob("python3*/site-packages/nvidia")
        folders = (str(nvidia / library / "lib") for nvidia in packages for library in CUDA_LIBRARIES)
        return dataclasses.replace(spec, library_path=tuple(folders))

    def estimate(self, config: FasterWhisperConfig) -> Estimate | None:
        """From the variables listed in model.bin; None if it can't be read."""
        try:
            return estimate.footprint(config, model_file.read(config.path))
        except ModelUnusableError:
            return None

    def inputs(self, config: FasterWhisperConfig) -> frozenset[Modality]:
        """Audio."""
        return frozenset({"audio"})

    def capabilities(self, config: FasterWhisperConfig) -> Capabilities:
        """Those of speech recognition."""
        return speech_recognition.CAPABILITIES


def _path_problems(path: Path) -> Iterator[str]:
    try:
        model = model_file.read(path)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    if model.specification != "WhisperSpec":
        yield f"path: {path} holds a {model.specification.removesuffix('Spec')} model; this runtime serves Whisper"
    if not (path / "tokenizer.json").is_file():
        # without it faster-whisper would download one
        yield f"path: there is no tokenizer.json in {path}; copy it from the model it was converted from"
