"""The configuration keys of a faster_whisper model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from runtimes.adapters.speech_recognition import MAX_AUDIO_S, DefaultLanguage, MaxAudio
from runtimes.adapters.worker_adapter import ModelPath, WorkerConfig
from runtimes.base import Modality

ComputeType = Literal[
    "default",
    "auto",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
]


class FasterWhisperConfig(WorkerConfig):
    """A Whisper model converted for CTranslate2."""

    type: Literal["asr"] = Field(default="asr", description="What the model is for: speech recognition.")
    modalities: list[Modality] = Field(default=["audio"], description="What the model takes as input.")
    path: ModelPath = Field(description="The model's folder: model.bin, config.json, tokenizer.json.")
    compute_type: ComputeType = Field(
        default="default",
        description="Type that weights are computed in; default: as they are stored, auto: the fastest there is.",
    )
    beam_size: int = Field(default=5, ge=1, le=20, description="Beams of the search; fewer are faster.")
    vad: bool = Field(default=False, description="Leave out what holds no speech, found by a small model beforehand.")
    default_language: DefaultLanguage = None
    max_audio_s: MaxAudio = MAX_AUDIO_S
