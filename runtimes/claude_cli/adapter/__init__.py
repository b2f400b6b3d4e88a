"""A model that a command line program asks for, run once for each request: Claude's own CLI, or any that reads a prompt.

The prompt goes to its stdin, never into its arguments, which other users of the machine can see; no shell has a part in it.
What it prints becomes a chat completion. The program reaches a service of others, so requests must allow that as for every
remote model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from runtimes.adapters.remote_adapter import RemoteAdapter, checked_variable, nothing_for_workers
from runtimes.base import Capabilities, Endpoint, ModelUnusableError, ProgramCall, ProgramSpec
from runtimes.claude_cli.adapter import conversation
from runtimes.claude_cli.adapter.answer import StreamedAnswer, WholeAnswer
from runtimes.claude_cli.adapter.output import OUTPUTS
from runtimes.model_config import Modality, ModelConfig

CHAT: Final = "/v1/chat/completions"
SYSTEM: Final = "system.txt"
PLACEHOLDERS: Final = ("model", "system_file")
CLAUDE: Final = (
    *("claude", "--print", "--output-format", "stream-json", "--verbose", "--include-partial-messages"),
    *("--model", "${model}", "--no-session-persistence", "--setting-sources", "", "--strict-mcp-config"),
    *("--disable-slash-commands", "--tools", ""),
)
CLAUDE_ENV: Final = {"CLAUDE_CODE_DISABLE_ATTACHMENTS": "1"}
"""Else it reads the files that a prompt mentions, as in `@/etc/passwd`, tools or not."""
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


class ClaudeCliAdapter(RemoteAdapter[ClaudeCliConfig]):
    """Claude's CLI, or a program like it."""

    name = "claude_cli"
    summary = (
        "A model behind a command line program that is run for each request, as Claude's CLI; requests must allow it."
    )
    all_endpoints = frozenset((Endpoint(CHAT),))
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    heeds_max_tokens = False
    config = ClaudeCliConfig

    def check(self, config: ClaudeCliConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """A missing program. Variables are not looked for: it is the daemon's environment that counts."""
        try:
            _program(config)
        except ModelUnusableError as error:
            return (str(error),)
        return ()

    def connect(self, config: ClaudeCliConfig, environment: Mapping[str, str]) -> ProgramSpec:
        """Raises ModelUnusableError for a missing program, or a variable that isn't set."""
        missing = [name for name in config.pass_env if name not in environment]
        if missing:
            raise ModelUnusableError(
                f"pass_env: the environment variable {missing[0]}, which its program needs, is not set for llmux"
            )
        program = _program(config)

        def call(body: bytes, folder: Path) -> ProgramCall:
            return _call(config, program, body, folder)

        return ProgramSpec(
            call,
            env={**CLAUDE_ENV, **{name: environment[name] for name in config.pass_env}, **config.env},
            parallel=config.parallel,
            timeout_s=config.timeout_s,
            output_bytes=config.output_mib << 20,
        )

    def needs_permission(self, config: ClaudeCliConfig) -> bool:
        """As configured."""
        return not config.allow_remote

    def target_inflight(self, config: ClaudeCliConfig) -> int:
        """As many processes as there may be."""
        return min(config.parallel, config.target_inflight or config.parallel)

    def prompt_cache(self, config: ClaudeCliConfig) -> None:
        """Theirs."""

    def inputs(self, config: ClaudeCliConfig) -> frozenset[Modality]:
        """Text."""
        return frozenset(("text",))

    def upstream_model(self, config: ClaudeCliConfig) -> str:
        """As configured."""
        return config.upstream_model

    def capabilities(self, config: ClaudeCliConfig) -> Capabilities:
        """Conversations in text, without tools of the client's. Whether it thinks is the program's to know."""
        return Capabilities(modalities=("text",), tools=False, multi_turn=True)


def _program(config: ClaudeCliConfig) -> str:
    """Its full path. Raises ModelUnusableError."""
    name = config.command[0]
    found = shutil.which(name, path=config.env.get("PATH")) if "/" not in name else _executable(Path(name))
    if found is None:
        raise ModelUnusableError(f"command: {name} is not a program on PATH")
    return str(Path(found).absolute())


def _executable(path: Path) -> str | None:
    path = path.expanduser()
    return str(path) if path.is_file() and os.access(path, os.X_OK) else None


def _call(config: ClaudeCliConfig, program: str, body: bytes, folder: Path) -> ProgramCall:
    asked = conversation.read(body)
    prompt, words, files = asked.prompt, config.command[1:], dict[str, bytes]()
    if asked.system and config.system_args:
        words, files = [*words, *config.system_args], {SYSTEM: asked.system.encode()}
    elif asked.system:
        prompt = f"{asked.system}\n\n{prompt}"
    values = {"model": config.upstream_model, "system_file": str(folder / SYSTEM)}
    answer = StreamedAnswer if asked.stream else WholeAnswer
    return ProgramCall(
        argv=(program, *(_PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in words)),
        stdin=prompt.encode(),
        files=files,
        ignored=asked.ignored,
        answer=answer(OUTPUTS[config.output](), config.upstream_model, include_usage=asked.include_usage),
    )
