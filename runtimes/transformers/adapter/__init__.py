"""Hugging Face model folders on transformers. The model's `type` decides which `Kind` answers and which program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from runtimes.base import Adapter, Capabilities, Contradiction, Endpoint, LaunchContext, LaunchSpec, Thinking
from runtimes.estimate import Estimate
from runtimes.model_config import Modality
from runtimes.shared.kernel import Kernel
from runtimes.sizing import Room, Sizing
from runtimes.transformers.adapter.config import TransformersConfig
from runtimes.transformers.adapter.kind import Kind
from runtimes.transformers.adapter.language import Language
from runtimes.transformers.adapter.speech import Speech

KINDS: Final[Mapping[str, Kind]] = MappingProxyType({"llm": Language(), "asr": Speech()})


class TransformersAdapter(Adapter[TransformersConfig]):
    """One process per model; all of them in one environment."""

    name = "transformers"
    summary = "Language models, vision and speech recognition from Hugging Face folders, on transformers."
    all_endpoints = frozenset[Endpoint]().union(*(kind.all_endpoints for kind in KINDS.values()))
    requirements = Path(__file__).parents[1] / "requirements.lock"
    config = TransformersConfig
    spreads = True
    divides = True
    offload_key = "device_map"

    def check(self, config: TransformersConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """Problems of the folder and its content, and keys that don't exist for models of this type."""
        return (*_foreign_keys(config), *KINDS[config.type].check(config, runtimes_dir=runtimes_dir))

    def launch(self, config: TransformersConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        return KINDS[config.type].launch(config, context)

    def kernels(
        self, config: TransformersConfig, described: Callable[[], Mapping[str, JsonValue]]
    ) -> tuple[Kernel, ...]:
        """The kernels for the model's type and the quantisation of its weights."""
        return KINDS[config.type].kernels(config, described)

    def target_inflight(self, config: TransformersConfig) -> int:
        """The number of requests that a worker of this type serves at once."""
        return KINDS[config.type].target_inflight(config)

    def endpoints(self, config: TransformersConfig) -> frozenset[Endpoint]:
        """The endpoints of the model's type."""
        return KINDS[config.type].all_endpoints

    def estimate(self, config: TransformersConfig) -> Estimate | None:
        """From the files' headers; None if they don't suffice."""
        return KINDS[config.type].estimate(config)

    def sized(self, config: TransformersConfig, room: Room | None) -> tuple[TransformersConfig, Sizing | None]:
        """Chooses the context of language models, by their folder."""
        return KINDS[config.type].sized(config, room)

    def thinking(self, config: TransformersConfig) -> Thinking | None:
        """Depends on the model's type and its files."""
        return KINDS[config.type].thinking(config)

    def chat_template(self, config: TransformersConfig) -> str | None:
        """The chat template of a language model."""
        return KINDS[config.type].chat_template(config)

    def inputs(self, config: TransformersConfig) -> frozenset[Modality] | None:
        """Depends on the model's type and its files."""
        return KINDS[config.type].inputs(config)

    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """From the model's files."""
        return KINDS[config.type].capabilities(config)

    def context_settings(self, config: TransformersConfig, tokens: int) -> Mapping[str, JsonValue]:
        """The key for the context. Each concurrent request has its own context of this size."""
        return {"n_ctx": tokens} if "n_ctx" in KINDS[config.type].overridable_keys else {}

    def overridable(self, config: TransformersConfig) -> Mapping[str, Mapping[str, JsonValue]]:
        """Keys for memory and speed, never for files."""
        return KINDS[config.type].overridable(config)


def _foreign_keys(config: TransformersConfig) -> Iterator[str]:
    for other, kind in KINDS.items():
        if other != config.type:
            for key in sorted(kind.keys & config.model_fields_set - KINDS[config.type].keys):
                yield Contradiction(f"{key}: only models of type {other} have it, and this one's is {config.type}")
