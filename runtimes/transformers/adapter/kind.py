"""What differs between the types of models that this runtime serves: one `Kind` each."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from pydantic import JsonValue

from runtimes.base import Capabilities, Endpoint, Estimate, LaunchContext, Modality, Thinking
from runtimes.shared.kernel import Kernel
from runtimes.transformers.adapter.config import TransformersConfig


class Kind(abc.ABC):
    """The part of the adapter for one type of model. Stateless."""

    program: ClassVar[str]  # the worker program's name, as for `python -m`
    keys: ClassVar[frozenset[str]]  # configuration keys that only models of this type have
    overridable: ClassVar[tuple[str, ...]]
    endpoints: ClassVar[frozenset[Endpoint]]

    @abc.abstractmethod
    def problems(self, config: TransformersConfig) -> Iterator[str]:
        """Reasons why it can't start, each naming its key. Reads metadata only."""

    @abc.abstractmethod
    def options(self, config: TransformersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The settings of this worker beside the common ones. Raises ModelUnusableError."""

    def parallel(self, config: TransformersConfig) -> int:
        """Requests that its worker serves concurrently."""
        return config.parallel

    @abc.abstractmethod
    def estimate(self, config: TransformersConfig) -> Estimate:
        """Memory it will take. Raises ModelUnusableError if the files don't suffice."""

    @abc.abstractmethod
    def inputs(self, config: TransformersConfig) -> frozenset[Modality] | None:
        """Its input modalities."""

    @abc.abstractmethod
    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """What it can do, from its files."""

    def thinking(self, config: TransformersConfig) -> Thinking | None:
        """The fields that switch its reasoning; None where there is no such switch."""
        return None

    def kernels(
        self, config: TransformersConfig, described: Callable[[], Mapping[str, JsonValue]]
    ) -> tuple[Kernel, ...]:
        """Kernels that its worker loads on a GPU, see hub_kernels.UsesKernels."""
        return ()
