"""The adapter of models that others run."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TypeVar

from pydantic import JsonValue

from runtimes.base import Adapter, LaunchContext, LaunchSpec, RemoteSpec
from runtimes.model_config import ModelConfig

C = TypeVar("C", bound=ModelConfig)


class RemoteAdapter(Adapter[C]):
    """A runtime whose models others run: they take no process and no memory here, and are never loaded or evicted."""

    remote = True

    def launch(self, config: C, context: LaunchContext) -> LaunchSpec:
        """Never called."""
        raise AssertionError(f"{self.name} starts no process")

    @abc.abstractmethod
    def connect(self, config: C, environment: Mapping[str, str]) -> RemoteSpec:
        """How to reach it. `environment` is the daemon's own, which holds the key. Raises ModelUnusableError."""

    def overridable(self, config: C) -> Mapping[str, Mapping[str, JsonValue]]:
        """Nothing: there is no load."""
        return {}
