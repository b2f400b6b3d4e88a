"""`llmux loads`: what is being loaded, how far it is, and what became of the last loads."""

from __future__ import annotations

import click

from supervisor.cli import client, output
from supervisor.cli.client import Client, Json
from supervisor.cli.options import answer, daemon_options

PATH = "/v1/admin/loads"
HEAD = ("LOAD", "MODEL", "STATE", "DONE", "WAITED", "TOOK", "EXPECTED", "LEFT", "ASKED", "WHY")


@click.group()
def loads() -> None:
    """Show the loads that wait or run and the last that ended; cancel one."""


@loads.command("list")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="So many at most, the newest.")
@daemon_options
def loads_list(limit: int, daemon: Client, as_json: bool) -> None:
    """Show each load: how far it is, how long it takes and should take, and why it waits or ended."""
    told = daemon.get(PATH)
    found = client.rows(told)[:limit]
    shown = output.Table([HEAD, *map(_row, found)]) if found else "Nothing was loaded yet."
    answer({**told, "data": found}, shown, *_estimates(told), as_json=as_json)


def _estimates(told: Json) -> list[output.Styled]:
    estimates = client.part(told, "estimates")
    error, seconds = estimates.get("mean_error"), estimates.get("mean_error_s")
    if not isinstance(error, int | float) or not isinstance(seconds, int | float):
        return []
    count = estimates.get("loads")
    loads = "1 load" if count == 1 else f"{count} loads"
    return [output.dim(f"Expected times were off by {seconds:.1f} s ({error:.0%}) on average, of {loads}.")]


def _row(one: Json) -> output.Row:
    progress = one.get("progress")
    return (
        output.text(one.get("id")),
        output.text(one.get("worker")),
        output.state(str(one.get("state"))),
        f"{progress:.0%}" if isinstance(progress, float | int) else "-",
        *(output.duration(one.get(name)) for name in ("waited_s", "took_s", "expected_s", "eta_s")),
        output.clock(one.get("asked_at")),
        output.text(one.get("stage") if one.get("state") == "loading" and one.get("stage") else one.get("reason")),
    )


@loads.command("cancel")
@click.argument("number", metavar="LOAD")
@daemon_options
def loads_cancel(number: str, daemon: Client, as_json: bool) -> None:
    """Cancel LOAD, wherever it stands. Requests that wait for it get an error; the next one loads the model again."""
    told = daemon.delete(f"{PATH}/{client.quoted(number)}")
    answer(told, f"The load of {told.get('model')} is cancelled.", as_json=as_json)
