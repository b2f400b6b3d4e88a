"""`llmux ps`, `load` and `unload`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from supervisor.cli.options import daemon_options, model_argument, print_json

if TYPE_CHECKING:
    from supervisor.cli.client import Client


@click.command()
@click.option("--wide", is_flag=True, help="Show all columns, uncut.")
@daemon_options
def ps(wide: bool, daemon: Client, as_json: bool) -> None:
    """Show every model: state, device, memory, requests, and the reason of the last change."""
    from supervisor.cli import client, models, output  # noqa: PLC0415  # not for declaring

    answer = daemon.get("/v1/admin/models")
    if as_json:
        print_json(answer)
    else:
        output.show(models.table_of(client.rows(answer), wide=wide))


@click.command()
@model_argument()
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override this setting until the model is unloaded; may be given several times.",
)
@daemon_options
def load(model: str, settings: tuple[str, ...], daemon: Client, as_json: bool) -> None:
    """Load MODEL and wait until it is ready. Also resets a failed one."""
    from supervisor.cli import models, output  # noqa: PLC0415  # not for declaring

    answer = models.load(daemon, model, models.overrides(settings))
    if as_json:
        print_json(answer)
    else:
        output.show(models.table_of([answer]))


@click.command()
@model_argument()
@click.option("--force", is_flag=True, help="Abort running requests instead of letting them finish.")
@daemon_options
def unload(model: str, force: bool, daemon: Client, as_json: bool) -> None:
    """Unload MODEL and wait until its memory is back."""
    from supervisor.cli import models, output  # noqa: PLC0415  # not for declaring

    answer = models.unload(daemon, model, force=force)
    if as_json:
        print_json(answer)
    else:
        output.show(models.table_of([answer]))


COMMANDS = (ps, load, unload)
