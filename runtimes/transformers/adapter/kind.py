"""What the adapter asks about a model of one type. There is one `Kind` for each type that this runtime serves."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from pydantic import JsonValue

from runtimes.base import Capabilities, Endpoint, Estimate, LaunchContext, Modality, Thinking
from runtimes.shared.kernel import Kernel
from runtimes.transformers.adapter.config import TransformersConfig


class Kind(abc.ABC):
    """Everything that differs between models of one type and another. Stateless."""

    program: ClassVar[str]  # the worker, as `python -m` would name it
    keys: ClassVar[frozenset[str]]  # configuration keys that only models of this type have
    overridable: ClassVar[tuple[str, ...]]
    endpoints: ClassVar[frozenset[Endpoint]]

    @abc.abstractmethod
    def problems(self, config: TransformersConfig) -> Iterator[str]:
        """Why it can't start, each a sentence naming the key. Reads metadata only."""

    @abc.abstractmethod
    def options(self, config: TransformersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError."""

    def parallel(self, config: TransformersConfig) -> int:
        """Requests its worker works on at once."""
        return config.parallel

    @abc.abstractmethod
    def estimate(self, config: TransformersConfig) -> Estimate:
        """Memory it will take. Raises ModelUnusableError where the files don't tell."""

    @abc.abstractmethod
    def inputs(self, config: TransformersConfig) -> frozenset[Modality] | None:
        """What it takes as input."""

    @abc.abstractmethod
    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """What it can do, from its files."""

    def thinking(self, config: TransformersConfig) -> Thinking | None:
        """The fields that switch its reasoning; None where there is no such switch."""
        return None

    def kernels(
        self, config: TransformersConfig, described: Callable[[], Mapping[str, JsonValue]]
    ) -> tuple[Kernel, ...]:
        """What its worker loads from the hub's kernels on a GPU; see hub_kernels.UsesKernels."""
        return ()
