"""Any program that speaks HTTP as a model: a command line with placeholders, a health path, a list of endpoints.

The command is a list of words, or one string that is split as a shell would split it, without running a shell. `${port}`,
`${host}`, `${model}` and `${parts}` are replaced within single words, so a value never becomes two words; `$${` stands for
`${`. `${parts}` is the worker's memory on each of its devices in MiB, such as 9000,5000.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from runtimes.base import (
    CHAT_TEMPLATE,
    Adapter,
    Contradiction,
    Endpoint,
    HealthCheck,
    LaunchContext,
    LaunchSpec,
    ModelUnusableError,
    Thinking,
)
from runtimes.command import containers
from runtimes.estimate import Estimate
from runtimes.model_config import ModelConfig
from runtimes.path_pattern import pattern_of

KEY_VARIABLE: Final = "LLMUX_WORKER_KEY"
_SAMPLE: Final = {"port": "8100", "host": "127.0.0.1", "model": "model", "parts": "1"}
PLACEHOLDERS: Final = tuple(_SAMPLE)
DEFAULT_ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/moderations",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
)

_DASHES: Final = ("–", "—", "−")
_CURLY: Final = ("“", "”", "„", "‘", "’")
_PLACEHOLDER = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<name>[^}]*)\}|(?P<open>\$\{)")
_COMMENTS = (
    re.compile(  # comments, and line breaks that are escaped; shlex would take a # inside of a word for a comment
        r"""(?P<kept>'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n])|\\\n|(?<!\S)\#[^\n]*""", re.DOTALL
    )
)
_FIXED_PORT = re.compile(
    r"(?<!\S)((?:--(?:\w+-)*port|-[pP])[= ]|(?:--[\w-]+=)?(?:https?://)?[\w.\[\]-]*:)\d{2,5}(?![\w.])"
)
_ENDPOINT = re.compile(r"(?:(?P<method>[A-Z]+) +)?(?P<path>/[^\s?#]*)")


def _parse_endpoint(text: str, loads: bool | None = None) -> Endpoint:
    """The endpoint that this text describes. Raises ValueError with the expected form."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not 'METHOD /path' or '/path'")
    path = match["path"]
    names_a_thing = pattern_of(path) is not None
    if match["method"] in (None, "POST"):
        return Endpoint(path)
    if match["method"] == "GET":
        return Endpoint(path, "GET", loads=names_a_thing if loads is None else loads)
    raise ValueError(f"{text!r}: the method is {match['method']}, but must be GET or POST")


def _checked_endpoint(text: str) -> str:
    _parse_endpoint(text)
    return text


def _unknown_placeholders(word: str) -> Iterator[str]:
    for match in _PLACEHOLDER.finditer(word):
        if match["open"]:
            yield "${ without its }"
        elif match["escaped"] is None and match["name"] not in PLACEHOLDERS:
            yield match[0]


def _split_words(command: list[str] | str) -> list[str]:
    """The command's words; a text is split as a shell would split it. Raises ValueError for an open quote."""
    if not isinstance(command, str):
        return command
    return shlex.split(_COMMENTS.sub(lambda found: found["kept"] or "", command))


def _checked_words(value: list[str] | str | None) -> list[str] | str | None:
    """Raises ValueError for a command that can't be split or has unknown placeholders."""
    if value is None:
        return None
    words = _split_words(value)
    if not words or not words[0]:
        raise ValueError("the command is empty")
    for word in words:
        if (trouble := _typographic_problem(word)) is not None:
            raise ValueError(trouble)
        _checked_word(word)
    return value


def _typographic_problem(word: str) -> str | None:
    """The problem of a word with typographic characters, which a word processor or web page put in; None: no problem."""
    if "\u00a0" in word:
        return "a non-breaking space (U+00A0) joins what should be two words: type a plain space"
    if word[:1] in _DASHES:
        return f"{word}: begins with a dash ({word[0]}) that no program takes for an option: type -"
    if word[:1] in _CURLY:
        return f"{word}: begins with a curly quote, which is a letter like any other there: type a straight one"
    return None


def _checked_word(word: str) -> str:
    if unknown := list(dict.fromkeys(_unknown_placeholders(word))):
        known = ", ".join(f"${{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"{', '.join(unknown)}: not a placeholder; there are {known}, and $${{ for a plain ${{")
    return word


Command = Annotated[list[str] | str, AfterValidator(_checked_words)]


class CommandConfig(ModelConfig):
    """A model served by a program of your own."""

    cmd: Command = Field(
        description="The program and its arguments, as a list or one string (split, never given to a shell).",
        examples=[["my-server", "--port", "${port}"]],
    )
    env: dict[str, Annotated[str, AfterValidator(_checked_word)]] = Field(
        default_factory=dict, description="Further environment variables; placeholders work here too."
    )
    health_path: str = Field(default="/health", pattern=r"^/", description="Answers 2xx once the model is ready.")
    stop_cmd: Command | None = Field(default=None, description="Run instead of the first SIGTERM.")
    kill_cmd: Command | None = Field(
        default=None,
        description="Run after every end, also of llmux itself: ends what cmd started outside its own processes. Default: "
        "removes the container of docker, podman or nerdctl run.",
    )
    cwd: Annotated[Path, Field(strict=False)] | None = Field(default=None, description="Where the program is run.")
    endpoints: list[Annotated[str, AfterValidator(_checked_endpoint)]] = Field(
        default_factory=lambda: list(DEFAULT_ENDPOINTS),
        description="Paths it serves: '/path' or 'METHOD /path'; '/a/{name}' is any part, '/a/*' the rest. Default: OpenAI's inference paths.",
    )
    loads: bool | None = Field(
        default=None,
        description="Whether a GET loads the model and counts as its use, as every other request does. Default: of a path that "
        "names a thing ('/files/*', '/a%2Fb'); of any other, such as /slots, it only says what a loaded model does.",
    )
    auth: Literal["none", "bearer"] = Field(
        default="none",
        description=f"bearer: it must refuse requests without the key that it finds in {KEY_VARIABLE}.",
    )
    upstream_model: str | None = Field(
        default=None, description="Model name the program insists on. Default: it takes any."
    )
    thinking: bool = Field(default=False, description="It understands chat_template_kwargs.enable_thinking.")
    library_path: list[Annotated[Path, Field(strict=False)]] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH."
    )
    files: list[Annotated[Path, Field(strict=False)]] = Field(
        default_factory=list, description="Model files; without vram_mib their size is the estimate of its memory."
    )


class CommandAdapter(Adapter[CommandConfig]):
    """The adapter of any program that speaks HTTP."""

    name = "command"
    summary = "Any program that speaks HTTP: a command line with ${port}."
    all_endpoints = frozenset(map(Endpoint, DEFAULT_ENDPOINTS))
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "top_k": ("top_k",),
        "min_p": ("min_p",),
        "typical_p": ("typical_p",),
        "repetition_penalty": ("repetition_penalty", "repeat_penalty"),  # vLLM's, llama.cpp's
        "repeat_last_n": ("repeat_last_n",),
    }
    config = CommandConfig
    spreads = True
    divides = True

    def check(self, config: CommandConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """Problems: a missing program or folder, a variable that only llmux sets."""
        return tuple(_problems(config))

    def launch(self, config: CommandConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the program. Raises ModelUnusableError if it is missing."""
        values = {
            "port": str(context.port),
            "host": context.host,
            "model": context.model,
            "parts": ",".join(map(str, context.parts_mib)),
        }
        cmd, kill_cmd = (
            _fill_words(config.cmd, values),
            _fill_words(config.kill_cmd, values) if config.kill_cmd else None,
        )
        if containers.is_container(cmd):
            name = f"llmux-{re.sub(r'[^A-Za-z0-9_.-]', '-', context.model)}-{context.port}"
            cmd, remove = containers.prepare(cmd, name, context.host)
            kill_cmd = kill_cmd or remove
        return LaunchSpec(
            argv=_with_full_path("cmd", cmd, config),
            env={
                **{name: _fill_word(value, values) for name, value in config.env.items()},
                **context.device_environment(),
                **({KEY_VARIABLE: context.key} if config.auth == "bearer" else {}),
            },
            cwd=config.cwd,
            library_path=tuple(map(str, config.library_path)),
            health=HealthCheck(config.health_path),
            auth=f"Bearer {context.key}" if config.auth == "bearer" else None,
            stop_argv=_with_full_path("stop_cmd", _fill_words(config.stop_cmd, values), config)
            if config.stop_cmd
            else None,
            kill_argv=_with_full_path("kill_cmd", kill_cmd, config) if kill_cmd else None,
            host=context.host,
            port=context.port,
        )

    def endpoints(self, config: CommandConfig) -> frozenset[Endpoint]:
        """The endpoints that the configuration lists."""
        return frozenset(_parse_endpoint(text, config.loads) for text in config.endpoints)

    def estimate(self, config: CommandConfig) -> Estimate | None:
        """The size of `files` plus a third; None without `files`."""
        sizes = [path.stat().st_size for path in config.files if path.is_file()]
        if not sizes:
            return None
        size_mib = -(-sum(sizes) // (1 << 20))
        files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
        return Estimate(mib=-(-size_mib * 13 // 10), source="file_size", detail=f"{files} of {size_mib} MiB, times 1.3")

    def weights(self, config: CommandConfig) -> tuple[Path, ...]:
        """The configured `files`."""
        return tuple(config.files)

    def needs_set_uid(self, config: CommandConfig) -> bool:
        """Rootless podman needs set-UID programs, to map users in a container."""
        words = _fill_words(config.cmd, _SAMPLE)
        return containers.is_container(words) and PurePath(words[0]).name == "podman" and os.geteuid() != 0

    def prompt_cache(self, config: CommandConfig) -> None:
        """None: only the program knows."""

    def thinking(self, config: CommandConfig) -> Thinking | None:
        """By an argument of the chat template, if the configuration says that the program supports it."""
        return CHAT_TEMPLATE if config.thinking else None

    def upstream_model(self, config: CommandConfig) -> str | None:
        """The configured name."""
        return config.upstream_model


def _fill_words(command: list[str] | str, values: Mapping[str, str]) -> list[str]:
    words = _split_words(command)
    return [_fill_word(word, values) for word in words]


def _fill_word(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: "${" if match["escaped"] else values[match["name"]], word)


def _with_full_path(key: str, words: list[str], config: CommandConfig) -> tuple[str, ...]:
    """The command with its program's full path: a bare name is searched in PATH (of `env`, if set), another starts at `cwd`."""
    if "/" in words[0]:
        path = ((config.cwd or Path()) / words[0]).absolute()
        program = str(path) if path.is_file() and os.access(path, os.X_OK) else None
    else:
        program = shutil.which(words[0], path=config.env.get("PATH"))
    if program is None:
        raise ModelUnusableError(f"{key}: {words[0]} is not a program on PATH")
    return (program, *words[1:])


def _port_problem(config: CommandConfig) -> str | None:
    """Why the program can't know its port; None: cmd or env has the placeholder."""
    words = _split_words(config.cmd)
    if any(match["name"] == "port" for word in (*words, *config.env.values()) for match in _PLACEHOLDER.finditer(word)):
        return None
    fixed = _FIXED_PORT.search(" ".join(words))
    if fixed is not None:
        fixed_port = f"{fixed[1]}${{port}}"
        return f"cmd: {fixed[0]} is a fixed port, and llmux chooses the port of each worker: write {fixed_port} instead"
    return "cmd: nothing tells the program its port, which llmux chooses: put ${port} into cmd or env, as in --port ${port}"


def _problems(config: CommandConfig) -> Iterator[str]:
    if (problem := _port_problem(config)) is not None:
        yield Contradiction(problem)
    words = _fill_words(config.cmd, _SAMPLE)
    if containers.is_container(words):
        yield from (Contradiction(f"cmd: {problem}") for problem in containers.problems(words, _SAMPLE["port"]))
    for key, command in (("cmd", config.cmd), ("stop_cmd", config.stop_cmd), ("kill_cmd", config.kill_cmd)):
        try:
            if command is not None:
                _with_full_path(key, _fill_words(command, _SAMPLE), config)
        except ModelUnusableError as error:
            yield str(error)
    if config.cwd is not None and not config.cwd.is_dir():
        yield f"cwd: {config.cwd}: there is no such folder"
    if KEY_VARIABLE in config.env:
        yield Contradiction(f"env: {KEY_VARIABLE} is set by llmux")
