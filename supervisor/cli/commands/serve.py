"""`llmux serve` and `llmux demo`."""

from __future__ import annotations

from pathlib import Path

import click

from supervisor.cli.options import Command, config_option


def _settings(command: Command) -> Command:
    for option in (
        click.option(
            "--log-format",
            type=click.Choice(["auto", "console", "json"]),
            help="auto: console on a terminal, else JSON.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="Least severe events to log.",
        ),
        click.option(
            "--state-dir", type=click.Path(path_type=Path), help="Where learned footprints and logs are kept."
        ),
        click.option("--port", type=int, help="Port to listen on; 0 takes any that is free."),
        click.option("--host", help="Address to listen on."),
    ):
        command = option(command)
    return command


def _run(
    config: Path | None,
    *,
    demo: bool,
    host: str | None,
    port: int | None,
    state_dir: Path | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    from supervisor.cli.serve import serve as run_daemon  # noqa: PLC0415  # the other commands need nothing of it

    flags: dict[str, object] = {
        "server.host": host,
        "server.port": port,
        "server.state_dir": str(state_dir) if state_dir is not None else None,
        "server.log_level": log_level,
        "server.log_format": log_format,
    }
    run_daemon(config, flags, demo=demo)


@click.command()
@config_option
@click.option(
    "--demo", is_flag=True, help="Serve tiny scripted models; installs the embedded llama.cpp runtime if needed."
)
@_settings
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
    _run(
        config,
        demo=demo,
        host=host,
        port=port,
        state_dir=state_dir,
        log_level=log_level,
        log_format=log_format,
    )


@click.command()
@_settings
def demo(
    host: str | None, port: int | None, state_dir: Path | None, log_level: str | None, log_format: str | None
) -> None:
    """Serve tiny scripted models, the same as serve --demo: to see how everything works."""
    _run(
        None,
        demo=True,
        host=host,
        port=port,
        state_dir=state_dir,
        log_level=log_level,
        log_format=log_format,
    )


COMMANDS = (serve, demo)
