"""Shared by the adapters of speech recognition runtimes: keys, endpoints, capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, TypeVar

from pydantic import Field, JsonValue

from runtimes.adapters import whisper_sizes
from runtimes.adapters.worker_adapter import OwnWorkerConfig, WorkerAdapter
from runtimes.base import Capabilities, Contradiction, Endpoint
from runtimes.model_config import Modality
from runtimes.shared.languages import NAMES, code_of

ENDPOINTS: Final = frozenset({Endpoint("/v1/audio/transcriptions"), Endpoint("/v1/audio/translations")})
CAPABILITIES: Final = Capabilities(modalities=("audio",), tools=False, thinking=False, multi_turn=False)
MAX_AUDIO_S: Final = 7200.0

DefaultLanguage = Annotated[
    str | None,
    Field(
        description="Language of requests that don't name one, such as en. Default: what is heard; some models can't tell."
    ),
]
MaxAudio = Annotated[
    float,
    Field(gt=0, description="Longest audio that is taken, in seconds. Decoded, an hour is 220 MiB of host memory."),
]

C = TypeVar("C", bound=OwnWorkerConfig)


class WhisperAdapter(WorkerAdapter[C]):
    """A runtime of Whisper models. The key `model` may choose a model by its size."""

    all_endpoints = ENDPOINTS

    def inputs(self, config: C) -> frozenset[Modality]:
        """The model takes audio only."""
        return frozenset({"audio"})

    def capabilities(self, config: C) -> Capabilities:
        """The capabilities of every speech recognition model."""
        return CAPABILITIES

    def known_as(self, config: C) -> tuple[str, ...]:
        """The names by which clients know a Whisper model of this size."""
        return whisper_sizes.names(getattr(config, "model", None))


def options(default_language: str | None, max_audio_s: float) -> Mapping[str, JsonValue]:
    """The worker settings that `runtimes.sdk.transcription` reads."""
    return {
        "default_language": None if default_language is None else code_of(default_language, NAMES),
        "max_audio_s": max_audio_s,
    }


def problems(default_language: str | None) -> Iterator[str]:
    """The problem of an unknown default language."""
    if default_language is not None and code_of(default_language, NAMES) is None:
        yield Contradiction(f"default_language: {default_language!r} is no language code such as en, de, zh")
