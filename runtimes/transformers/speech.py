"""Speech recognition: what the folder says about a model, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from runtimes.base import Capabilities, Endpoint, Estimate, LaunchContext, Modality, ModelUnusableError
from runtimes.transformers.config import TransformersConfig
from runtimes.transformers.kind import Kind


class Speech(Kind[TransformersConfig]):
    """Transcriptions and translations."""

    program = "runtimes.transformers.transcribe.worker"
    endpoints = frozenset({Endpoint("/v1/audio/transcriptions"), Endpoint("/v1/audio/translations")})
    keys = frozenset()
    overridable = ("dtype", "threads")

    def problems(self, config: TransformersConfig) -> Iterator[str]:
        """Why it can't start."""
        yield "type: asr is not served yet"

    def options(self, config: TransformersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Raises ModelUnusableError."""
        raise ModelUnusableError("type: asr is not served yet")

    def estimate(self, config: TransformersConfig) -> Estimate:
        """Raises ModelUnusableError."""
        raise ModelUnusableError("type: asr is not served yet")

    def inputs(self, config: TransformersConfig) -> frozenset[Modality]:
        """Sound."""
        return frozenset({"audio"})

    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """What it takes."""
        return Capabilities(("audio",))
