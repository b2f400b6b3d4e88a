"""The interface of a type of models: the runtime has an adapter for each type."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from runtimes.adapters.hub_kernels import VARIABLE, cache
from runtimes.adapters.worker_adapter import WorkerAdapter
from runtimes.base import LaunchContext, LaunchSpec
from runtimes.transformers.adapter.config import TransformersConfig


class Kind(WorkerAdapter[TransformersConfig]):
    """The adapter for one type of model."""

    name = "transformers"
    config = TransformersConfig
    keys: ClassVar[frozenset[str]]  # configuration keys that only models of this type have

    def launch(self, config: TransformersConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        spec = super().launch(config, context)
        return dataclasses.replace(spec, env={**spec.env, VARIABLE: str(cache(context.runtimes_dir, config.env))})
