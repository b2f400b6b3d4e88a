"""The manual page, made from the commands' help: `llmux man` prints it, and the wheel has it as share/man/man1/llmux.1.

Also lists commands and spells their arguments, for docs/reference/cli.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

import click

from supervisor.cli.exit_codes import MEANINGS

_ENVIRONMENT: Final = {
    "LLMUX_CONFIG": "The configuration file, where --config doesn't name one.",
    "LLMUX_URL": "The daemon to ask, where --url doesn't name one.",
    "LLMUX_API_KEY": "The API key to ask it with, where --key doesn't give one.",
    "LLMUX_SERVER__PORT": "The setting server.port; so with all of server, limits and devices.",
    "HF_TOKEN": "A token of the model hub, for gated and private models.",
    "HF_ENDPOINT": "Another model hub.",
    "NO_COLOR": "Leave out colours.",
}
_FILES: Final = {
    "~/.config/llmux/llmux.yaml": "The configuration; ./llmux.yaml and /etc/llmux/llmux.yaml are looked for, too.",
    "~/.config/llmux/api_keys.yaml": "The API keys.",
    "~/.local/state/llmux": "What the daemon learned, and the workers' logs.",
    "~/.local/share/llmux": "The runtimes' environments, and the models that were pulled.",
}


def page(main: click.Group) -> str:
    """The whole page, in roff."""
    lines = [
        '.TH LLMUX 1 "" llmux "User commands"',
        ".SH NAME",
        f"llmux \\- {_escaped(main.get_short_help_str(limit=200)).rstrip('.')}",
        ".SH SYNOPSIS",
        r"\fBllmux\fR \fICOMMAND\fR [\fIOPTION\fR]... [\fIARGUMENT\fR]...",
        ".SH COMMANDS",
    ]
    for path, command in commands(main, ("llmux",)):
        lines += _command_lines(path, command)
    exits = {str(int(code)): meaning.replace("`", "") for code, meaning in MEANINGS.items()}
    for title, entries in (("EXIT STATUS", exits), ("ENVIRONMENT", _ENVIRONMENT), ("FILES", _FILES)):
        lines.append(f".SH {title}")
        for name, meaning in entries.items():
            lines += _entry_lines(name, meaning)
    return "\n".join((*lines, ""))


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group and not hidden, with its words on the command line."""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))
    elif not command.hidden:
        yield path, command


def argument_name(argument: click.Argument) -> str:
    """The argument's name in a call."""
    assert argument.name is not None
    if argument.metavar is not None:
        return argument.metavar
    name = argument.name.upper() if argument.required else f"[{argument.name.upper()}]"
    return f"{name}..." if argument.nargs == -1 else name


def _command_lines(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    arguments = [argument_name(found) for found in command.params if isinstance(found, click.Argument)]
    yield f".SS {_escaped(' '.join((*path, *arguments)))}"
    for number, paragraph in enumerate(inspect.cleandoc(command.help or "").split("\n\n")):
        yield from (*([".PP"] if number else []), _escaped(" ".join(paragraph.split())))
    for option in command.params:
        if isinstance(option, click.Option):
            takes = "" if option.is_flag else f" {option.type.name.removesuffix(' range')}"
            if isinstance(option.type, click.Choice):
                takes = f" {'|'.join(option.type.choices)}"
            yield from _entry_lines(", ".join(option.opts), option.help or "", takes)


def _entry_lines(name: str, meaning: str, takes: str = "") -> list[str]:
    return [".TP", rf"\fB{_escaped(name)}\fR{_escaped(takes)}", _escaped(meaning)]


def _escaped(text: str) -> str:
    """The text escaped for roff: no line of it is a roff request, and hyphens can be copied."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
