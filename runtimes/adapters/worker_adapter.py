"""The adapter of every worker program in this package: built on the worker SDK, run by its runtime's own interpreter.

The settings are passed as one JSON argument, the key in the environment. A worker never asks the hub: models are files.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeVar

from pydantic import Field, JsonValue

from runtimes.base import Adapter, HealthCheck, LaunchContext, LaunchSpec, ModelUnusableError, RuntimeNotInstalledError
from runtimes.model_config import ModelConfig

BOOTSTRAP: Final = Path(__file__).parents[1] / "sdk" / "bootstrap.py"
KEY_VARIABLE: Final = "LLMUX_WORKER_KEY"
QUEUE: Final = 64  # requests that may wait in the worker, although the supervisor sends at most `parallel` at once

ModelPath = Annotated[Path, Field(strict=False)]


Threads = Annotated[int | None, Field(ge=1, description="CPU threads of the model. Default: all cores.")]


class OwnWorkerConfig(ModelConfig):
    """The keys of every runtime whose worker is in this package."""

    if TYPE_CHECKING:  # declared below, after other keys: a model's fingerprint depends on the keys' order
        threads: Threads

    @property
    def at_once(self) -> int:
        """The number of requests that the worker works on at once."""
        return 1


class WorkerConfig(OwnWorkerConfig):
    """The keys of runtimes whose worker works on one request at a time."""

    removed_keys: ClassVar[Mapping[str, str]] = {"parallel": "remove it: this runtime works on one request at a time"}

    threads: Threads = None


class ParallelConfig(OwnWorkerConfig):
    """The keys of runtimes whose worker works on several requests at once."""

    parallel: int = Field(default=1, ge=1, le=64, description="Requests the worker works on at once.")
    threads: Threads = None

    @property
    def at_once(self) -> int:
        """The key `parallel`."""
        return self.parallel


C = TypeVar("C", bound=OwnWorkerConfig)


class WorkerAdapter(Adapter[C]):
    """A runtime with one worker program, `program`."""

    program: ClassVar[str]

    @abc.abstractmethod
    def problems(self, config: C) -> Iterator[str]:
        """Reasons why the model can't start, each a sentence that names the key."""

    @abc.abstractmethod
    def options(self, config: C, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings, beside those of every worker. Called only where `problems` finds nothing.

        Raises ModelUnusableError for something that this device or environment lacks.
        """

    def module(self, config: C) -> str:
        """The worker program's name, as for `python -m`."""
        return self.program

    def check(self, config: C, *, runtimes_dir: Path) -> tuple[str, ...]:
        """The problems of this configuration, as a tuple."""
        return tuple(self.problems(config))

    def launch(self, config: C, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError, or ModelUnusableError for the first problem."""
        python = interpreter(self.name, context)
        for problem in self.problems(config):
            raise ModelUnusableError(problem)
        threads = {} if config.threads is None else {"OMP_NUM_THREADS": str(config.threads)}
        return worker_spec(
            python,
            self.module(config),
            context,
            parallel=config.at_once,
            options=self.options(config, context),
            env={**threads, **config.env},
        )

    def target_inflight(self, config: C) -> int:
        """The number of requests that the worker works on at once."""
        return config.at_once if config.target_inflight is None else config.target_inflight


def interpreter(runtime: str, context: LaunchContext) -> Path:
    """The Python of a runtime's own environment. Raises RuntimeNotInstalledError."""
    python = context.environment(runtime) / "bin" / "python"
    if not python.exists():
        raise RuntimeNotInstalledError(
            runtime, f"The runtime {runtime} is not installed.", f"llmux runtimes install {runtime}"
        )
    return python


def worker_spec(
    python: Path,
    module: str,
    context: LaunchContext,
    *,
    parallel: int,
    options: Mapping[str, JsonValue],
    env: Mapping[str, str],
    offline: bool = True,
) -> LaunchSpec:
    """How to start the worker program `module` with this `python`. `offline`: the worker must not use the hub."""
    settings = {
        "model": context.model,
        "host": context.host,
        "port": context.port,
        "parallel": parallel,
        "queue": QUEUE,
        **options,
    }
    return LaunchSpec(
        argv=(str(python), "-I", str(BOOTSTRAP), module, json.dumps(settings)),
        env={
            **({"HF_HUB_OFFLINE": "1"} if offline else {}),
            "TOKENIZERS_PARALLELISM": "false",
            **env,
            **context.device_environment(),
            KEY_VARIABLE: context.key,
        },
        health=HealthCheck("/health"),
        auth=f"Bearer {context.key}",
        metrics="/metrics",
        host=context.host,
        port=context.port,
    )
