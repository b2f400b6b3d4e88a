"""`llmux top`, `logs`, `events` and `why`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from supervisor.cli.options import daemon_options, model_argument, print_json, print_json_line

if TYPE_CHECKING:
    from supervisor.cli.client import Client

KINDS = ("decision", "model", "memory", "request", "alert", "reload")


@click.command()
@click.option("--once", is_flag=True, help="Show it once and exit; --json does this, too.")
@click.option(
    "--interval", type=click.FloatRange(0.2, 60.0), default=1.0, show_default=True, help="Seconds between updates."
)
@daemon_options
def top(once: bool, interval: float, daemon: Client, as_json: bool) -> None:
    """Watch devices, models and requests until q or Ctrl-C."""
    from supervisor.cli import top as screen  # noqa: PLC0415  # not for declaring

    if as_json:
        print_json(screen.look(daemon))
    else:
        screen.watch(daemon, interval_s=interval, once=once)


@click.command()
@model_argument()
@click.option("-f", "--follow", is_flag=True, help="Follow new lines until Ctrl-C.")
@click.option("-n", "--lines", default=200, show_default=True, type=click.IntRange(1, 100_000), help="How many lines.")
@daemon_options
def logs(model: str, follow: bool, lines: int, daemon: Client, as_json: bool) -> None:
    """Show the last log lines of MODEL's worker, running or not."""
    from supervisor.cli import client, output  # noqa: PLC0415  # not for declaring

    path = f"/v1/admin/models/{client.quoted(model)}/logs?lines={lines}"
    if follow:
        for event in daemon.events(f"{path}&follow=true"):
            if as_json:
                print_json_line({"line": event.data})
            else:
                click.echo(output.clean(click.unstyle(event.data)))
        return
    content = daemon.text(path)
    if as_json:
        print_json({"model": model, "lines": content.splitlines()})
    elif content:
        click.echo(output.clean(click.unstyle(content)), nl=not content.endswith("\n"))
    else:
        click.echo(f"{model} has written nothing yet; its worker starts with: llmux load {model}", err=True)


def _kinds(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """For the shell's completion: the last of the kinds between commas; none of them twice."""
    before, comma, last = incomplete.rpartition(",")
    there = before.split(",")
    return [f"{before}{comma}{kind}" for kind in KINDS if kind.startswith(last) and kind not in there]


@click.command()
@click.option("--types", metavar="KIND,KIND", shell_complete=_kinds, help=f"Only these: {', '.join(KINDS)}.")
@daemon_options
def events(types: str | None, daemon: Client, as_json: bool) -> None:
    """Print events as they happen, until Ctrl-C. With --json each line is an object."""
    from supervisor.cli import event_view  # noqa: PLC0415  # not for declaring

    wanted = [word.strip() for word in types.split(",")] if types is not None else list(KINDS)
    if unknown := [word for word in wanted if word not in KINDS]:
        raise click.BadParameter(f"there are {', '.join(KINDS)}, not {unknown[0]!r}", param_hint="--types")
    event_view.follow(daemon, wanted, as_json=as_json)


@click.command()
@model_argument(required=False)
@click.option("-n", "--limit", default=30, show_default=True, type=click.IntRange(1, 1000), help="How many decisions.")
@daemon_options
def why(model: str | None, limit: int, daemon: Client, as_json: bool) -> None:
    """Show the decisions about MODEL (or all models), and their reasons."""
    from supervisor.cli import client, event_view, output  # noqa: PLC0415  # not for declaring

    query = f"?limit={limit}" + (f"&model={client.quoted(model)}" if model is not None else "")
    answer = daemon.get(f"/v1/admin/decisions{query}")
    if as_json:
        print_json(answer)
    else:
        output.show(event_view.decisions_table(client.rows(answer), with_model=model is None))


COMMANDS = (top, logs, events, why)
