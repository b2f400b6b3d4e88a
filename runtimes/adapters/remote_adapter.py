"""The base adapter of models that somebody else runs."""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from pydantic import JsonValue

from runtimes.base import Adapter, LaunchContext, LaunchSpec, RemoteSpec
from runtimes.model_config import ModelConfig

C = TypeVar("C", bound=ModelConfig)

_FOR_WORKERS: Final = (
    "vram_mib",
    "devices",
    "env",
    "keep_alive_s",
    "hold_s",
    "replicas",
    "replica_max",
    "startup_timeout_s",
    "startup_limit_s",
    "grace_s",
)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def nothing_for_workers(config: ModelConfig, *, but: Collection[str] = ()) -> None:
    """Raises ValueError for a key that only makes sense for models on this machine, except the keys in `but`."""
    for key in _FOR_WORKERS:
        default = type(config).model_fields[key].get_default(call_default_factory=True)
        if key not in but and getattr(config, key) != default:
            raise ValueError(f'"{key}" is for models that run here, and others run this one')


def checked_variable(name: str) -> str:
    """A valid name of an environment variable.

    Raises ValueError for any other text. The message doesn't repeat the text: it may be the secret itself.
    """
    if _VARIABLE.fullmatch(name) is None:
        raise ValueError("it is not the name of an environment variable; the key itself never stands in this file")
    return name


class RemoteAdapter(Adapter[C]):
    """A runtime with models that somebody else runs: no worker, no memory here, no loading, no eviction."""

    remote = True

    def launch(self, config: C, context: LaunchContext) -> LaunchSpec:
        """Never called: a remote model has no process to start."""
        raise AssertionError(f"{self.name} starts no process")

    @abc.abstractmethod
    def connect(self, config: C, environment: Mapping[str, str]) -> RemoteSpec:
        """How to reach the model. `environment` is the daemon's own; it holds the key. Raises ModelUnusableError."""

    def overridable(self, config: C) -> Mapping[str, Mapping[str, JsonValue]]:
        """No key: a remote model is never loaded."""
        return {}
