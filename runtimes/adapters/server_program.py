"""Models on a server that another project makes: what its runtimes have in common.

Such a runtime is mostly data: the option of each key, the options and variables that llmux sets itself, the paths that it
serves, where it tells its health and metrics. What is left to each is its program's first words, and its key. Options
that have no key go into `extra_args`.

The model is a Hugging Face folder. Its footprint is that of its weights and of a cache for as many tokens as the server is
told to keep, so that the server takes what was reserved for it, whoever else is on the device.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, TypeVar

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import VALUE_BYTES, Config
from runtimes.adapters.kv_cache import activation_bytes, cache_bytes, layer_caches
from runtimes.adapters.options import Options, command_line, keys_of, refused_options
from runtimes.base import (
    CHAT_TEMPLATE,
    Adapter,
    Capabilities,
    Contradiction,
    Endpoint,
    HealthCheck,
    LaunchContext,
    LaunchSpec,
    ModelUnusableError,
    Thinking,
    in_order,
)
from runtimes.device_kind import visibility_variables
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality, ModelConfig
from runtimes.prompt_cache import PromptCache

FilePath = Annotated[Path, Field(strict=False)]
USUAL_CONTEXT: Final = 8192
"""Tokens, where neither the configuration nor the model says fewer."""


class ServerProgramConfig(ModelConfig):
    """A Hugging Face folder on another project's server."""

    path: FilePath = Field(description="The model's folder.")
    library_path: list[FilePath] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH, for builds with their own CUDA."
    )
    extra_args: list[str] = Field(default_factory=list, description="Further command line options of the server.")


C = TypeVar("C", bound=ServerProgramConfig)


class ServerProgramAdapter(Adapter[C]):
    """One such server. The class attributes are its definition."""

    flags: ClassVar[Options]  # the option of each key that is passed on as it is
    own_options: ClassVar[frozenset[str]]  # set by llmux, and not to be in `extra_args`
    own_variables: ClassVar[Mapping[str, str]]  # variable → why it is not to be in `env`
    health: ClassVar[HealthCheck] = HealthCheck("/health")
    metrics: ClassVar[str | None] = "/metrics"
    program_mib: ClassVar[int]  # what it takes beside the model

    @abc.abstractmethod
    def program(self, config: C, context: LaunchContext) -> tuple[str, ...]:
        """The words that start it, up to its options. Raises RuntimeNotInstalledError, ModelUnusableError."""

    @abc.abstractmethod
    def settings(self, config: C, context: LaunchContext) -> Mapping[str, JsonValue]:
        """What it is told beside the configured keys, by the keys of `flags`; null: nothing."""

    @abc.abstractmethod
    def secrets(self, context: LaunchContext) -> Mapping[str, str]:
        """The variables that hold its key, and what else only llmux sets."""

    @abc.abstractmethod
    def tokens(self, config: C) -> int | None:
        """Tokens that its cache is made for, of all requests together; None: it doesn't follow from the configuration."""

    def cache_width(self, config: C, model: Config) -> float:
        """Bytes of a cached value."""
        return VALUE_BYTES.get(model.dtype or "", 2)

    def own_problems(self, config: C) -> Iterator[str]:
        """Further problems that `check` tells."""
        yield from ()

    def check(self, config: C, *, runtimes_dir: Path) -> tuple[str, ...]:
        """A folder without a model, options and variables that llmux sets."""
        return tuple(self._problems(config))

    def launch(self, config: C, context: LaunchContext) -> LaunchSpec:
        """Raises RuntimeNotInstalledError, ModelUnusableError."""
        _folder(config)
        words = self.program(config, context)
        kept = config.model_dump(mode="json", include=set(self.flags))
        values = {**kept, **self.settings(config, context), "host": context.host, "port": context.port}
        told = {key: value for key, value in values.items() if value is not None and value is not False}
        return LaunchSpec(
            argv=(*words, *command_line(self.flags, told), *config.extra_args),
            env={
                "PATH": os.pathsep.join(filter(None, (str(Path(words[0]).parent), os.environ.get("PATH")))),
                "HF_HUB_OFFLINE": "1",
                **config.env,
                **context.device_environment(),
                **self.secrets(context),
            },
            library_path=tuple(map(str, config.library_path)),
            health=self.health,
            auth=f"Bearer {context.key}",
            metrics=self.metrics,
            host=context.host,
            port=context.port,
        )

    def estimate(self, config: C) -> Estimate | None:
        """Weights as they are stored, the cache, one step's activations, the program; None where that can't be told."""
        tokens = self.tokens(config)
        try:
            found = _folder(config)
        except ModelUnusableError:
            return None
        if tokens is None:
            return None
        layers = layer_caches(found.config, value_bytes=self.cache_width(config, found.config))
        parts = {
            "weights": found.weights.bytes_as(None),
            "KV cache": cache_bytes(layers, tokens),
            "activations": activation_bytes(found.config, tokens=min(tokens, 2048)),
            "program": self.program_mib * MIB,
        }
        return Estimate.of(parts, f"{tokens} tokens in the cache")

    def prompt_cache(self, config: C) -> PromptCache | None:
        """Only the program knows."""
        return None

    def thinking(self, config: C) -> Thinking | None:
        """By a chat template argument, for models that chat."""
        return None if config.type == "embedding" else CHAT_TEMPLATE

    def chat_template(self, config: C) -> str | None:
        """The folder's."""
        return checkpoints.template_in(config.path)

    def inputs(self, config: C) -> frozenset[Modality] | None:
        """From the model's config.json, and what the configuration adds."""
        try:
            takes_images = checkpoints.config(config.path).takes_images
        except ModelUnusableError:
            return super().inputs(config)
        return frozenset({*config.modalities, "text", *(("image",) if takes_images else ())})

    def capabilities(self, config: C) -> Capabilities:
        """From the model's folder; tools and thinking from words in its chat template."""
        template = self.chat_template(config) or ""
        chats = config.type != "embedding"
        return Capabilities(
            modalities=in_order(self.inputs(config) or config.modalities),
            tools=chats and "tools" in template,
            thinking=chats and "think" in template,
            multi_turn=chats and bool(template),
            context=self.context(config),
        )

    @abc.abstractmethod
    def context(self, config: C) -> int | None:
        """Tokens of one request."""

    def _problems(self, config: C) -> Iterator[str]:
        try:
            _folder(config)
        except ModelUnusableError as error:
            yield str(error)
        yield from self.own_problems(config)
        keys = {option: key for option, key in keys_of(self.flags).items() if option not in self.own_options}
        for problem in refused_options(config.extra_args, self.own_options, keys):
            yield Contradiction(f"extra_args: {problem}")
        for variable in sorted({*self.own_variables, *visibility_variables()} & config.env.keys()):
            yield Contradiction(f"env: {variable} {self.own_variables.get(variable, 'is set by llmux')}")


def usual_context(config: ServerProgramConfig) -> int:
    """As much as the model was made for, at most what is usual."""
    try:
        trained = checkpoints.config(config.path).context
    except ModelUnusableError:
        trained = None
    return min(trained or USUAL_CONTEXT, USUAL_CONTEXT)


def runnable(key: str, program: Path) -> Path:
    """The program, as configured by this key. Raises ModelUnusableError for one that can't be run."""
    if not os.access(program, os.X_OK) or program.is_dir():
        raise ModelUnusableError(f"{key}: {program} is not a program that can be run")
    return program.absolute()


def endpoints(*paths: str) -> frozenset[Endpoint]:
    """POST endpoints of these paths."""
    return frozenset(map(Endpoint, paths))


def _folder(config: ServerProgramConfig) -> checkpoints.Folder:
    try:
        return checkpoints.read(config.path)
    except ModelUnusableError as error:
        raise ModelUnusableError(f"path: {error}") from error
