"""Models on a server that another project makes: one adapter, driven by a description of the server.

A description is two classes. The configuration has the server's options: each key is passed on as the option of its name,
unless the class says otherwise. The adapter has the facts: the program's path, the variable with its key, its
endpoints, and the options that follow from the launch. A method exists only where one server differs from all others. Options without
a key go into `extra_args`.

`FolderServerAdapter` is for servers that load a Hugging Face folder. Its footprint is that of its weights and of a cache for as
many tokens as llmux lets the server keep, so the server takes the reserved memory, however much other programs left free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeVar

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.checkpoints import VALUE_BYTES, Config
from runtimes.adapters.kv_cache import activation_bytes, cache_bytes, layer_caches
from runtimes.adapters.options import Options, command_line, keys_of, of_keys, refused_options
from runtimes.adapters.worker_adapter import BOOTSTRAP, KEY_VARIABLE
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
    RuntimeNotInstalledError,
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

LOCAL: Final = frozenset({"path", "model", "folder", "python", "binary", "library_path", "extra_args"})
"""Keys that say where model and program are, and are no options."""

NOWHERE: Final = Path("/nonexistent")


class ServerConfig(ModelConfig):
    """A model on another project's server. Each key of a subclass becomes the option of the same name, except those in `LOCAL`."""

    reserved: ClassVar[str]  # options that only llmux sets, not to be in `extra_args`: words
    no_options: ClassVar[Collection[str]] = ()  # further keys that are no options
    renamed: ClassVar[Options] = {}  # key → its option, where the names differ, or the pair for true and false
    spellings: ClassVar[Mapping[str, str]] = {}  # further options → the key that stands for them

    if TYPE_CHECKING:  # each subclass declares it, at its place in the order of its keys
        extra_args: list[str]

    @classmethod
    def flags(cls) -> Options:
        """The option of each key that has one."""
        keys = cls.model_fields.keys() - ModelConfig.model_fields.keys() - LOCAL - {*cls.no_options}
        return {**of_keys(sorted(keys)), **cls.renamed}

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Each spelling of an option that has a key → that key."""
        own = cls.own_options()
        return {option: key for option, key in keys_of(cls.flags()).items() if option not in own} | {**cls.spellings}

    @classmethod
    def own_options(cls) -> frozenset[str]:
        """Options that only llmux sets."""
        return frozenset(cls.reserved.split())


C = TypeVar("C", bound=ServerConfig)


class ServerAdapter(Adapter[C]):
    """The adapter of one server program. The class attributes describe the program."""

    program_key: ClassVar[str] = "binary"  # names the program
    places: ClassVar[tuple[str, ...]]  # paths to look at, with {environment} and {config.…}; a bare name: on PATH
    sibling_program: ClassVar[str] = ""  # a program in the same folder, run instead of the one found
    missing: ClassVar[str]  # the message if the program is in none of the `places`; may contain the same {…}
    remedy: ClassVar[str] = ""  # the command that installs it; empty: there is none
    starter: ClassVar[str] = ""  # our module that starts the server, if the program is a Python interpreter
    key_variable: ClassVar[str] = KEY_VARIABLE  # the environment variable with the server's key
    refused_variables: ClassVar[Mapping[str, str]] = {}  # further variables that `env` may not set → the reason
    health: ClassVar[HealthCheck] = HealthCheck("/health")
    metrics: ClassVar[str | None] = "/metrics"
    served_name: ClassVar[str] = ""  # the model's name in requests; empty: any

    def command_prefix(self, config: C, program: Path) -> tuple[str, ...]:
        """The command line up to the options. Raises ModelUnusableError."""
        return (str(program), *(("-I", str(BOOTSTRAP), self.starter) if self.starter else ()))

    def settings(self, config: C, context: LaunchContext) -> dict[str, JsonValue]:
        """Key → value of its option: configured, or set by the launch. A null is left out.

        Raises ModelUnusableError.
        """
        return config.model_dump(mode="json", include={*config.flags()})

    def variables(self, config: C, context: LaunchContext) -> Mapping[str, str]:
        """Environment variables of the worker, which the configured `env` may override."""
        return {"HF_HUB_OFFLINE": "1"}

    def problems(self, config: C) -> Iterator[str]:
        """Problems of the configuration, beside options and variables that only llmux sets. Part of `check`."""
        yield from ()

    def find_program(self, config: C, environment: Path = NOWHERE) -> Path:
        """The path of the program: configured, or else found. Raises RuntimeNotInstalledError or ModelUnusableError."""
        configured: Path | None = getattr(config, self.program_key)
        if configured is not None:
            if not os.access(configured, os.X_OK) or configured.is_dir():
                raise ModelUnusableError(f"{self.program_key}: {configured} is not a program that can be run")
            return configured.absolute()
        for place in self.places:
            if (found := shutil.which(place.format(config=config, environment=environment))) is not None:
                program = Path(found).absolute()
                program = program.with_name(self.sibling_program or program.name)
                if program.exists():
                    return program
        missing = self.missing.format(config=config, environment=environment)
        raise RuntimeNotInstalledError(self.name, missing, self.remedy) if self.remedy else ModelUnusableError(missing)

    def program_problems(self, config: C) -> Iterator[str]:
        """The problem of a configured program that can't be run, or of a missing program that no command installs."""
        try:
            self.find_program(config)
        except ModelUnusableError as error:
            yield str(error)
        except RuntimeNotInstalledError:
            pass

    def command(self, program: Path, config: C, values: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """The whole command line, with these values of its options."""
        return (*self.command_prefix(config, program), *command_line(config.flags(), values), *config.extra_args)

    def check(self, config: C, *, runtimes_dir: Path) -> tuple[str, ...]:
        """The server's own `problems`, then options and variables that only llmux sets."""
        variables = {self.key_variable, *self.refused_variables, *visibility_variables()} & config.env.keys()
        return (
            *self.problems(config),
            *option_problems(config),
            *(
                Contradiction(f"env: {variable} {self.refused_variables.get(variable, 'is set by llmux')}")
                for variable in sorted(variables)
            ),
        )

    def launch(self, config: C, context: LaunchContext) -> LaunchSpec:
        """How to start the server. Raises RuntimeNotInstalledError or ModelUnusableError."""
        program = self.find_program(config, context.environment(self.name))
        if context.device.kind.takes_whole:
            config = config.model_copy(update={"gpus": 1})
        values = {**self.settings(config, context), "host": context.host, "port": context.port}
        return LaunchSpec(
            argv=self.command(program, config, values),
            env={
                "PATH": os.pathsep.join(filter(None, (str(program.parent), os.environ.get("PATH")))),
                **self.variables(config, context),
                **config.env,
                **context.device_environment(),
                self.key_variable: context.key,
            },
            library_path=tuple(map(str, getattr(config, "library_path", ()))),
            health=self.health,
            auth=f"Bearer {context.key}",
            metrics=self.metrics,
            host=context.host,
            port=context.port,
        )

    def upstream_model(self, config: C) -> str | None:
        """`served_name`, the same for every model."""
        return self.served_name or None


class FolderServerConfig(ServerConfig):
    """A Hugging Face folder on another project's server."""

    path: FilePath = Field(description="The model's folder.")
    library_path: list[FilePath] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH, for builds with their own CUDA."
    )
    extra_args: list[str] = Field(default_factory=list, description="Further command line options of the server.")


F = TypeVar("F", bound=FolderServerConfig)


class FolderServerAdapter(ServerAdapter[F]):
    """A server of language models, each of which is a Hugging Face folder."""

    context_key: ClassVar[str]  # tokens of one request
    requests_key: ClassVar[str]  # the number of concurrent requests
    program_mib: ClassVar[int] = 0  # memory beside the model: an estimate until a worker was measured

    def tokens(self, config: F) -> int | None:
        """The cache size in tokens, for all requests together; None: the configuration doesn't determine it."""
        return None

    def cache_width(self, config: F, model: Config) -> float:
        """Bytes of a cached value."""
        return VALUE_BYTES.get(model.dtype or "", 2)

    def cache_bytes(self, config: F, model: Config, tokens: int) -> int:
        """The size in bytes of a cache for this many tokens."""
        return cache_bytes(layer_caches(model, value_bytes=self.cache_width(config, model)), tokens)

    def problems(self, config: F) -> Iterator[str]:
        """The problem of a folder without a model."""
        try:
            _read_folder(config)
        except ModelUnusableError as error:
            yield str(error)

    def launch(self, config: F, context: LaunchContext) -> LaunchSpec:
        """How to start the server. Raises RuntimeNotInstalledError or ModelUnusableError."""
        _read_folder(config)
        return super().launch(config, context)

    def estimate(self, config: F) -> Estimate | None:
        """The stored weights, the cache, one step's activations and the program; None: unknown."""
        if (tokens := self.tokens(config)) is None:
            return None
        try:
            found = _read_folder(config)
        except ModelUnusableError:
            return None
        parts = {
            "weights": found.weights.bytes_as(None),
            "KV cache": self.cache_bytes(config, found.config, tokens),
            "activations": activation_bytes(found.config, tokens=min(tokens, 2048)),
            "program": self.program_mib * MIB,
        }
        return Estimate.of(parts, f"{tokens} tokens in the cache")

    def context(self, config: F) -> int:
        """Tokens of one request: as configured, else the model's own limit, but at most USUAL_CONTEXT."""
        described = _read_config(config)
        trained = described.context if described is not None else None
        return getattr(config, self.context_key) or min(trained or USUAL_CONTEXT, USUAL_CONTEXT)

    def context_settings(self, config: F, tokens: int) -> Mapping[str, JsonValue]:
        """The key for the context."""
        return {self.context_key: tokens}

    def target_inflight(self, config: F) -> int:
        """The number of requests that the server works on at once."""
        own: int = getattr(config, self.requests_key)
        return own if config.target_inflight is None else config.target_inflight

    def prompt_cache(self, config: F) -> PromptCache | None:
        """None, since only the program knows."""
        return None

    def thinking(self, config: F) -> Thinking | None:
        """An argument of the chat template, for chat models."""
        return None if config.type == "embedding" else CHAT_TEMPLATE

    def chat_template(self, config: F) -> str | None:
        """The chat template in the model's folder."""
        return checkpoints.template_in(config.path)

    def inputs(self, config: F) -> frozenset[Modality] | None:
        """From the model's config.json, and the configured modalities."""
        if (described := _read_config(config)) is None:
            return super().inputs(config)
        return frozenset({*config.modalities, "text", *(("image",) if described.takes_images else ())})

    def capabilities(self, config: F) -> Capabilities:
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


def endpoints(*paths: str) -> frozenset[Endpoint]:
    """POST endpoints of these paths."""
    return frozenset(map(Endpoint, paths))


def option_problems(config: ServerConfig) -> Iterator[str]:
    """Options in `extra_args` that llmux sets, or that have a key."""
    for problem in refused_options(config.extra_args, config.own_options(), config.options()):
        yield Contradiction(f"extra_args: {problem}")


def _read_folder(config: FolderServerConfig) -> checkpoints.Folder:
    try:
        return checkpoints.read(config.path)
    except ModelUnusableError as error:
        raise ModelUnusableError(f"path: {error}") from error


def _read_config(config: FolderServerConfig) -> Config | None:
    with contextlib.suppress(ModelUnusableError):
        return checkpoints.config(config.path)
    return None
