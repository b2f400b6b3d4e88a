"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from supervisor.cli import output
from supervisor.cli.client import Client
from supervisor.errors import LlmuxError

_ESCAPED: Final = {code: f"\\u{code:04x}" for code in output.UNSHOWN if code > 31}

Command = Callable[..., None]
_printed: Final = list[bool]()


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_config = click.option(
    "--config",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Configuration file. Default: the first of the usual places.",
)


def daemon_options(command: Command) -> Command:
    """`--url`, `--key` and `--json` for commands that use a running daemon: the command gets a client as `daemon`."""
    return _with_client(command, "admin")


def inference_options(command: Command) -> Command:
    """As `daemon_options`, for commands that need only a client's key."""
    return _with_client(command, "inference")


def _with_client(command: Command, scope: str) -> Command:
    @functools.wraps(command)
    def connected(*words: object, url: str | None, key: str | None, **options: object) -> None:
        command(*words, daemon=Client(url or _configured_url(options), key), **options)

    help_ = f"API key with the scope {scope}. Default: what a daemon of yours on this machine takes. [$LLMUX_API_KEY]"
    wrapped = click.option("--key", envvar="LLMUX_API_KEY", help=help_)(json_option(connected))
    return _url_option(wrapped)


_url_option = click.option("--url", envvar="LLMUX_URL", help="The daemon. Default: as configured. [$LLMUX_URL]")


def ask_options(command: Command) -> Command:
    """`--url` and `--key` for commands that change the configuration and then let the running daemon reload it."""
    key = click.option("--key", envvar="LLMUX_API_KEY", help="API key with the scope admin. [$LLMUX_API_KEY]")
    return _url_option(key(command))


def _configured_url(options: Mapping[str, object]) -> str:
    """The daemon's URL by the configuration of `--config`, if the command has that option, else by the one that `serve` would use."""
    from supervisor.cli.configuration import daemon_url  # noqa: PLC0415  # most of the start

    config = options.get("config")
    return daemon_url(config if isinstance(config, Path) else None)


def config_option(command: Command) -> Command:
    """`--config`, by default the file that `serve` would use; for commands whose arguments name other things.

    Where an argument is the name of a configuration file, the error shows the right command.
    """

    @functools.wraps(command)
    def looked(*words: object, config: Path | None, **options: object) -> None:
        path = click.get_current_context().command_path
        for value in options.values():
            for word in value if isinstance(value, tuple) else (value,):
                if isinstance(word, str) and word.endswith((".yaml", ".yml")) and Path(word).is_file():
                    raise click.UsageError(f"{word} is a configuration: {path} --config {word}")
        command(*words, config=config, **options)

    return _config(looked)


def config_path(command: Command) -> Command:
    """`--config PATH`, or PATH alone, for commands without other arguments. The command gets the path as `config`."""

    @functools.wraps(command)
    def named(*words: object, config: Path | None, config_path: Path | None, **options: object) -> None:
        if config is not None and config_path is not None:
            path = click.get_current_context().command_path
            raise click.UsageError(
                f"There is one configuration, not two ({config_path}, {config}): {path} --config {config}"
            )
        command(*words, config=config or config_path, **options)

    return click.argument("config_path", metavar="[PATH]", type=click.Path(path_type=Path), required=False)(
        _config(named)
    )


Flags = dict[str, object]
"""Settings from the command line, by their dotted keys; None: not given."""

_SERVER_OPTIONS: Final = (
    click.option("--host", help="Address to listen on."),
    click.option("--port", type=int, help="Port to listen on; 0 takes any that is free."),
    click.option("--state-dir", type=click.Path(), help="Where learned footprints and logs are kept."),
    click.option(
        "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least severe events to log."
    ),
    click.option(
        "--log-format",
        type=click.Choice(["auto", "console", "json"]),
        help="auto: console on a terminal, else JSON.",
    ),
)


def server_options(command: Command) -> Command:
    """The settings that `serve` takes on its command line, as one argument `flags`."""

    @functools.wraps(command)
    def collected(*words: object, **options: object) -> None:
        names = ("host", "port", "state_dir", "log_level", "log_format")
        command(*words, flags={f"server.{name}": options.pop(name) for name in names}, **options)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(_SERVER_OPTIONS), collected)


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def model_argument(*, required: bool = True, public: bool = False) -> Callable[[Command], Command]:
    """MODEL, completed with the daemon's names of models: configured names, or, with `public`, clients' names.

    Where no daemon answers, or it requires a key, the names come from the configuration file.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        daemon = Client(ctx.params.get("url") or _configured_url(ctx.params), ctx.params.get("key"))
        names = daemon.names(public=public)
        if not names:
            return (complete_public if public else complete_configured)(ctx, param, incomplete)
        return [name for name in names if name.lower().startswith(incomplete.lower())]

    return click.argument("model", required=required, shell_complete=complete)


def configured_names(config: Path | None, sections: Sequence[str]) -> list[str]:
    """The names in these sections of the configuration, each once; none where the file can't be read. Validates nothing."""
    from supervisor.catalog.document.document import Table  # noqa: PLC0415  # not for declaring
    from supervisor.cli.configuration import settings  # noqa: PLC0415  # not for declaring

    try:
        root = settings(config).tree()
    except (LlmuxError, OSError, RuntimeError):
        return []
    tables = [root.entries.get(name) for name in sections]
    return list(dict.fromkeys(name for table in tables if isinstance(table, Table) for name in table.entries))


def _completer_of(*sections: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        names = configured_names(ctx.params.get("config"), sections)
        return [name for name in names if name.lower().startswith(incomplete.lower())]

    return complete


complete_configured = _completer_of("models")
"""Completes the models of the configuration file for the shell; none where it can't be read."""

complete_public = _completer_of("virtual_models", "models")
"""Completes the models, and the virtual models, which stand for them."""


def print_json(value: object, *, indent: int | None = 2, err: bool = False) -> None:
    """Print JSON for machines, and escape unprintable characters and those that control a terminal."""
    _printed.append(True)
    click.echo(json.dumps(value, indent=indent, ensure_ascii=False, default=_to_builtins).translate(_ESCAPED), err=err)


def _to_builtins(value: object) -> object:
    """A struct as plain values."""
    import msgspec  # noqa: PLC0415  # not for declaring

    return msgspec.to_builtins(value)


def has_printed() -> bool:
    """Whether this command has printed JSON."""
    return bool(_printed)


def answer(value: object, *shown: output.Words | output.Table, as_json: bool) -> None:
    """Print the value as JSON for machines, else `shown` for people."""
    if as_json:
        print_json(value)
    else:
        output.show(*shown)
