"""The `llmux` command. Each subcommand is a few lines: arguments in, one call, a table or `--json` out.

Exit codes: 0 done, 1 it could not be done (the reason is on stderr), 2 wrong usage or configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from supervisor import __version__
from supervisor.errors import ConfigError, LlmuxError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


class _Group(click.Group):
    """Renders our errors: the message alone, no traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo("The configuration has mistakes:", err=True)
            for problem in error.problems:
                click.echo(f"  {problem}", err=True)
            sys.exit(EXIT_USAGE)
        except LlmuxError as error:
            click.echo(f"llmux: {error.message}", err=True)
            for line in error.detail:
                click.echo(f"  {line}", err=True)
            sys.exit(EXIT_FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmux")
def main() -> None:
    """Run many AI models on too little memory, one worker process each, behind one OpenAI-compatible API."""


# ------------------------------------------------------------------------------------------------------------- daemon


@main.command()
@click.option(
    "--config", type=click.Path(path_type=Path), help="Configuration file. Default: the first of the usual places."
)
@click.option(
    "--demo", is_flag=True, help="Serve tiny scripted models; installs the embedded llama.cpp runtime if needed."
)
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 takes any that is free.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Where learned footprints and logs are kept.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least severe events to log."
)
@click.option(
    "--log-format", type=click.Choice(["auto", "console", "json"]), help="auto: console on a terminal, else JSON."
)
def serve(
    config: Path | None,
    demo: bool,
    host: str | None,
    port: int | None,
    state_dir: Path | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run the daemon until it is told to stop."""
    from supervisor.cli.serve import serve as run_daemon  # noqa: PLC0415  # the other commands need nothing of it

    flags: dict[str, object] = {
        "server.host": host,
        "server.port": port,
        "server.state_dir": str(state_dir) if state_dir is not None else None,
        "server.log_level": log_level,
        "server.log_format": log_format,
    }
    run_daemon(config, flags, demo=demo)


# ------------------------------------------------------------------------------------------------- talking to a daemon


def daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--url`, `--key`, `--json` for commands that ask a running daemon."""
    command = click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON instead.")(command)
    command = click.option("--key", envvar="LLMUX_API_KEY", help="API key with the scope admin. [$LLMUX_API_KEY]")(
        command
    )
    return click.option(
        "--url", envvar="LLMUX_URL", default="http://127.0.0.1:8081", show_default=True, help="The daemon. [$LLMUX_URL]"
    )(command)


@main.command()
@daemon_options
def ps(url: str, key: str | None, as_json: bool) -> None:
    """Show every model: state, device, memory, requests, and the reason of the last change."""
    from supervisor.cli import client  # noqa: PLC0415

    answer = client.get(url, key, "/v1/admin/models")
    click.echo(json.dumps(answer, indent=2) if as_json else client.models_table(answer))


@main.command()
@click.argument("model")
@daemon_options
def load(model: str, url: str, key: str | None, as_json: bool) -> None:
    """Load MODEL and wait until it is ready. Also resets one that was given up."""
    from supervisor.cli import client  # noqa: PLC0415

    answer = client.post(url, key, f"/v1/admin/models/{client.quoted(model)}/load")
    click.echo(json.dumps(answer, indent=2) if as_json else client.models_table({"data": [answer]}))


@main.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="Cut running requests instead of letting them end.")
@daemon_options
def unload(model: str, force: bool, url: str, key: str | None, as_json: bool) -> None:
    """Unload MODEL and wait until its memory is back."""
    from supervisor.cli import client  # noqa: PLC0415

    query = "?force=true" if force else ""
    answer = client.post(url, key, f"/v1/admin/models/{client.quoted(model)}/unload{query}")
    click.echo(json.dumps(answer, indent=2) if as_json else client.models_table({"data": [answer]}))


@main.command()
@click.argument("model", required=False)
@click.option("--limit", default=30, show_default=True, type=click.IntRange(1, 1000), help="How many decisions.")
@daemon_options
def why(model: str | None, limit: int, url: str, key: str | None, as_json: bool) -> None:
    """Tell what was decided about MODEL (or all models), and why."""
    from supervisor.cli import client  # noqa: PLC0415

    query = f"?limit={limit}" + (f"&model={client.quoted(model)}" if model is not None else "")
    answer = client.get(url, key, f"/v1/admin/decisions{query}")
    click.echo(json.dumps(answer, indent=2) if as_json else client.decisions_lines(answer, with_model=model is None))


# ------------------------------------------------------------------------------------------------------ configuration


@main.group()
def config() -> None:
    """Check the configuration."""


@config.command("check")
@click.argument("path", type=click.Path(path_type=Path), required=False)
def config_check(path: Path | None) -> None:
    """Report every mistake of PATH (default: the file that `serve` would use)."""
    from supervisor.catalog import load as load_catalog  # noqa: PLC0415

    catalog = load_catalog(path)
    click.echo(f"No mistakes: {len(catalog.models)} models, {len(catalog.listing())} public names.")


# --------------------------------------------------------------------------------------------------------------- keys


@main.group()
def keys() -> None:
    """Make API keys."""


@keys.command("new")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["inference", "admin", "metrics"]),
    multiple=True,
    default=("inference",),
    show_default=True,
    help="What it opens; may be given several times.",
)
@click.option(
    "--expires", metavar="DATE", help="Until when, such as 2030-01-31 or 2030-01-31T12:00:00Z. Default: ever."
)
@click.option(
    "--config", type=click.Path(path_type=Path), help="Configuration file. Default: the first of the usual places."
)
@click.option("--file", "path", type=click.Path(path_type=Path), help="File of keys. Default: as configured.")
def keys_new(name: str, scopes: tuple[str, ...], expires: str | None, config: Path | None, path: Path | None) -> None:
    """Make a key called NAME, add it to the file of keys, and print its secret, once."""
    from supervisor.catalog.keys import Scope  # noqa: PLC0415
    from supervisor.cli import keys as files  # noqa: PLC0415

    path = path or files.keys_file(config)
    secret = files.add(path, name, [Scope(scope) for scope in dict.fromkeys(scopes)], expires)
    click.echo(f"Added {name} to {path}. This is the only time its key is shown; restart llmux to use it.", err=True)
    click.echo(secret)


# ----------------------------------------------------------------------------------------------------------- runtimes


@main.group()
def runtimes() -> None:
    """Install and remove the runtimes' own environments."""


def runtimes_dir_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--runtimes-dir`, by default where the daemon looks."""
    return click.option(
        "--runtimes-dir", type=click.Path(path_type=Path), help="Where environments are kept. Default: as configured."
    )(command)


@runtimes.command("install")
@click.argument("name")
@runtimes_dir_option
def runtimes_install(name: str, runtimes_dir: Path | None) -> None:
    """Build the environment of runtime NAME from its hash-pinned lock."""
    from supervisor.cli.environments import install, resolve  # noqa: PLC0415

    install(name, resolve(runtimes_dir), echo=click.echo)


@runtimes.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@runtimes_dir_option
def runtimes_list(runtimes_dir: Path | None, as_json: bool) -> None:
    """Show the runtimes and what is installed of them."""
    from supervisor.cli.environments import listing, resolve  # noqa: PLC0415

    rows = listing(resolve(runtimes_dir))
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(f"{row['name']:14} {row['state']}" for row in rows))


@runtimes.command("remove")
@click.argument("name")
@runtimes_dir_option
def runtimes_remove(name: str, runtimes_dir: Path | None) -> None:
    """Remove the environment of runtime NAME."""
    from supervisor.cli.environments import remove, resolve  # noqa: PLC0415

    remove(name, resolve(runtimes_dir), echo=click.echo)


# ------------------------------------------------------------------------------------------------------------ service


@main.group()
def service() -> None:
    """Run llmux as a systemd user service."""


@service.command("install")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Configuration file. Default: the first of the usual places."
)
@click.option("--linger", is_flag=True, help="Let it start at boot and outlive your logout.")
@click.option("--no-start", is_flag=True, help="Only write and enable it.")
@click.option("--socket", "address", metavar="HOST:PORT", help="Let systemd listen there and start llmux on demand.")
def service_install(config: Path | None, linger: bool, no_start: bool, address: str | None) -> None:
    """Write the user unit, enable and start it, and say what was done."""
    from supervisor.cli import service as systemd  # noqa: PLC0415

    host, _, port = (address or "").rpartition(":")
    if address is not None and not (host and port.isdecimal()):
        raise click.BadParameter(f"expected HOST:PORT, got {address!r}", param_hint="--socket")
    listen = (host.strip("[]"), int(port)) if address is not None else None
    systemd.install(click.echo, config=config, linger=linger, start=not no_start, address=listen)


@service.command("uninstall")
def service_uninstall() -> None:
    """Stop and disable it, and remove the units."""
    from supervisor.cli import service as systemd  # noqa: PLC0415

    systemd.uninstall(click.echo)


@service.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def service_status(as_json: bool) -> None:
    """Show what systemd says of it."""
    from supervisor.cli import service as systemd  # noqa: PLC0415

    facts = systemd.status(click.echo if not as_json else lambda _line: None)
    if as_json:
        click.echo(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
