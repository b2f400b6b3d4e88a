"""The types of models that this runtime serves: an adapter for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from pydantic import JsonValue

from runtimes.adapters.hub_kernels import VARIABLE, UsesKernels, cache
from runtimes.adapters.worker_adapter import WorkerAdapter
from runtimes.base import LaunchContext, LaunchSpec
from runtimes.shared.kernel import Kernel
from runtimes.transformers.adapter.config import TransformersConfig


class Kind(WorkerAdapter[TransformersConfig], UsesKernels[TransformersConfig]):
    """The adapter for one type of model."""

    name = "transformers"
    config = TransformersConfig
    keys: ClassVar[frozenset[str]]  # configuration keys that only models of this type have

    def launch(self, config: TransformersConfig, context: LaunchContext) -> LaunchSpec:
        """Raises RuntimeNotInstalledError, or ModelUnusableError."""
        spec = super().launch(config, context)
        return dataclasses.replace(spec, env={**spec.env, VARIABLE: str(cache(context.runtimes_dir, config.env))})

    def kernels(
        self, config: TransformersConfig, described: Callable[[], Mapping[str, JsonValue]]
    ) -> tuple[Kernel, ...]:
        """None."""
        return ()
