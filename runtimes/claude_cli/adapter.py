"""A model behind a command line program that runs once for each request: Claude's CLI, or any program that reads a prompt.

Our own worker runs the program. The prompt goes to its stdin, never into its arguments, which other users of the machine
can read; no shell is involved. The program sends prompts to somebody else's service, so requests must allow that, as for
every remote model. The worker uses no device.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from runtimes.adapters.remote_adapter import checked_variable, nothing_for_workers
from runtimes.adapters.worker_adapter import KEY_VARIABLE, worker_spec
from runtimes.base import Adapter, Capabilities, Endpoint, LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.model_config import Modality, ModelConfig

CHAT: Final = "/v1/chat/completions"
CLEANUP_S: Final = 30.0  # to clean up after a request, before the next one starts
PLACEHOLDERS: Final = ("model", "system_file")
CLAUDE: Final = (
    *("claude", "--print", "--output-format", "stream-json", "--verbose", "--include-partial-messages"),
    *("--model", "${model}", "--no-session-persistence", "--setting-sources", "", "--strict-mcp-config"),
    *("--disable-slash-commands", "--tools", ""),
)
CLAUDE_ENV: Final = {"CLAUDE_CODE_DISABLE_ATTACHMENTS": "1"}
"""Without this variable the CLI reads files that a prompt mentions, such as `@/etc/passwd`, even without tools."""
CLAUDE_SYSTEM: Final = ("--system-prompt-file", "${system_file}")

_PLACEHOLDER: Final = re.compile(r"\$\{([^}]*)\}")

Format = Literal["text", "claude_json", "claude_stream_json"]


def _checked_word(word: str) -> str:
    if "\0" in word:
        raise ValueError("a word of a command holds no NUL")
    unknown = [name for name in _PLACEHOLDER.findall(word) if name not in PLACEHOLDERS]
    if unknown:
        raise ValueError(f"${{{unknown[0]}}}: not a placeholder; there are ${{model}} and ${{system_file}}")
    return word


def _checked_program(words: list[str]) -> list[str]:
    if not words or not words[0]:
        raise ValueError("the command is empty")
    return words


Word = Annotated[str, AfterValidator(_checked_word)]


class ClaudeCliConfig(ModelConfig):
    """A model behind a command line program."""

    command: Annotated[list[Word], AfterValidator(_checked_program)] = Field(
        default=list(CLAUDE),
        description="The program and its arguments, never given to a shell; `${model}` is `upstream_model`. It reads the "
        "prompt from stdin. Default: Claude's CLI, without tools and settings.",
        examples=[["claude", "--print", "--output-format", "json", "--model", "${model}"]],
    )
    system_args: list[Word] = Field(
        default=list(CLAUDE_SYSTEM),
        description="Added for a request with a system prompt, which is in the file `${system_file}`. Empty: the system prompt "
        "stands before the prompt.",
        examples=[["--append-system-prompt-file", "${system_file}"]],
    )
    output: Format = Field(
        default="claude_stream_json",
        description="What it prints: plain text, or as Claude's CLI does with `--output-format json` or `stream-json`.",
        examples=["claude_json"],
    )
    upstream_model: str = Field(
        min_length=1, pattern=r"^[^-]", description="The model's name there.", examples=["sonnet"]
    )
    allow_remote: bool = Field(
        default=False, description="Serve every request. Default: only those that say `allow_remote` themselves."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables for the program.")
    pass_env: list[Annotated[str, AfterValidator(checked_variable)]] = Field(
        default_factory=list,
        description="Environment variables of the daemon that the program gets too, such as its key. Default: those for paths, "
        "language and home alone.",
        examples=[["ANTHROPIC_API_KEY"]],
    )
    timeout_s: float = Field(default=300.0, gt=0, le=86_400, description="It is killed when it has run so long.")
    output_mib: int = Field(default=8, ge=1, le=1024, description="It is killed when it has printed more.")
    parallel: int = Field(default=2, ge=1, le=64, description="Processes at once; further requests wait.")

    @model_validator(mode="after")
    def _checked(self) -> Self:
        nothing_for_workers(self, but=("env",))
        if self.modalities != ["text"]:
            raise ValueError('"modalities": the program is given text alone')
        if self.type != "llm":
            raise ValueError('"type": the program answers chats; it is an llm')
        if self.target_inflight == 0:
            raise ValueError('"target_inflight": 0 would be no limit; "parallel" says how many processes there may be')
        return self


class ClaudeCliAdapter(Adapter[ClaudeCliConfig]):
    """The adapter of Claude's CLI and of programs like it."""

    name = "claude_cli"
    summary = (
        "A model behind a command line program that is run for each request, as Claude's CLI; requests must allow it."
    )
    all_endpoints = frozenset((Endpoint(CHAT),))
    remote = True
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    heeds_max_tokens = False
    config = ClaudeCliConfig

    def check(self, config: ClaudeCliConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """The problem of a missing program. Variables aren't checked: only the daemon's environment counts."""
        try:
            _find_program(config)
        except ModelUnusableError as error:
            return (str(error),)
        return ()

    def launch(self, config: ClaudeCliConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises ModelUnusableError for a missing program, or a variable that isn't set."""
        missing = [name for name in config.pass_env if name not in os.environ]
        if missing:
            raise ModelUnusableError(
                f"pass_env: the environment variable {missing[0]}, which its program needs, is not set for llmux"
            )
        options: dict[str, JsonValue] = {
            "command": [_find_program(config), *config.command[1:]],
            "system_args": [*config.system_args],
            "output": config.output,
            "upstream_model": config.upstream_model,
            "timeout_s": config.timeout_s,
            "output_bytes": config.output_mib << 20,
        }
        spec = worker_spec(
            Path(sys.executable),
            "runtimes.claude_cli.worker",
            context,
            parallel=config.parallel,
            options=options,
            env={},
        )
        passed = {name: os.environ[name] for name in config.pass_env}
        env = {**CLAUDE_ENV, **passed, **config.env}  # the program inherits it, so nothing is added that is for workers
        return replace(spec, env={**env, KEY_VARIABLE: context.key}, patience_s=config.timeout_s + CLEANUP_S)

    def needs_permission(self, config: ClaudeCliConfig) -> bool:
        """The configured value."""
        return not config.allow_remote

    def target_inflight(self, config: ClaudeCliConfig) -> int:
        """The configured number of processes at once."""
        return min(config.parallel, config.target_inflight or config.parallel)

    def prompt_cache(self, config: ClaudeCliConfig) -> None:
        """None: the cache belongs to the remote service."""

    def inputs(self, config: ClaudeCliConfig) -> frozenset[Modality]:
        """The model takes text only."""
        return frozenset(("text",))

    def upstream_model(self, config: ClaudeCliConfig) -> str:
        """The configured value."""
        return config.upstream_model

    def overridable(self, config: ClaudeCliConfig) -> Mapping[str, Mapping[str, JsonValue]]:
        """No key: the worker has no load to change."""
        return {}

    def capabilities(self, config: ClaudeCliConfig) -> Capabilities:
        """Conversations in text, without the client's tools. Only the program knows whether the model thinks."""
        return Capabilities(modalities=("text",), tools=False, multi_turn=True)


def _find_program(config: ClaudeCliConfig) -> str:
    """The program's full path. Raises ModelUnusableError."""
    name = config.command[0]
    found = shutil.which(name, path=config.env.get("PATH")) if "/" not in name else _executable(Path(name))
    if found is None:
        raise ModelUnusableError(f"command: {name} is not a program on PATH")
    return str(Path(found).absolute())


def _executable(path: Path) -> str | None:
    path = path.expanduser()
    return str(path) if path.is_file() and os.access(path, os.X_OK) else None
