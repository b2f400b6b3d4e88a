"""`llmux config`."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def config() -> None:
    """Check the configuration."""


@config.command("check")
@click.argument("path", type=click.Path(path_type=Path), required=False)
def config_check(path: Path | None) -> None:
    """Report every mistake of PATH (default: the file that `serve` would use)."""
    from supervisor.catalog import load as load_catalog  # noqa: PLC0415  # only this command needs it

    catalog = load_catalog(path)
    click.echo(f"No mistakes: {len(catalog.models)} models, {len(catalog.listing())} public names.")


COMMANDS = (config,)
