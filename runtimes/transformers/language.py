"""Language models: what their folder says about them, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import JsonValue

from runtimes import checkpoints
from runtimes.base import Capabilities, Endpoint, Estimate, LaunchContext, Modality, ModelUnusableError, Thinking
from runtimes.transformers.config import TransformersConfig
from runtimes.transformers.kind import Kind

MIB: Final = 1 << 20
MOST_CONTEXT: Final = 8192  # where the configuration doesn't say


class Language(Kind[TransformersConfig]):
    """Chat and completions."""

    program = "runtimes.transformers.chat.worker"
    endpoints = frozenset({Endpoint("/v1/chat/completions"), Endpoint("/v1/completions")})
    keys = frozenset(
        {"n_ctx", "quantization", "device_map", "attention", "prefill_tokens"}
        | {"chat_template_file", "tool_format", "image_pixels"}
    )
    overridable = ("dtype", "parallel", "threads", "n_ctx", "quantization", "prefill_tokens", "image_pixels")

    def problems(self, config: TransformersConfig) -> Iterator[str]:
        """Without a model in the folder."""
        try:
            checkpoints.read(config.path)
        except ModelUnusableError as error:
            yield f"path: {error}"

    def options(self, config: TransformersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Raises ModelUnusableError."""
        raise NotImplementedError

    def estimate(self, config: TransformersConfig) -> Estimate:
        """Weights, caches, activations, program."""
        raise ModelUnusableError

    def inputs(self, config: TransformersConfig) -> frozenset[Modality]:
        """Text, and pictures where the model has eyes."""
        return frozenset({"text"})

    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """From configuration and chat template."""
        return Capabilities(("text",))

    def thinking(self, config: TransformersConfig) -> Thinking | None:
        """By arguments of the chat template."""
        return None
