"""`llmux loads`: the running loads with their progress, and the results of the last loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client
from supervisor.cli.options import answer, daemon_options

if TYPE_CHECKING:
    from supervisor.schema.load import Load, LoadEstimates

HEAD = ("LOAD", "MODEL", "STATE", "DONE", "WAITED", "TOOK", "EXPECTED", "LEFT", "ASKED", "WHY")


@click.group()
def loads() -> None:
    """Show the loads that wait or run and the last that ended; cancel one."""


@loads.command("list")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="So many at most, the newest.")
@daemon_options
def loads_list(limit: int, daemon: Client, as_json: bool) -> None:
    """Show each load: how far it is, how long it takes and should take, and why it waits or ended."""
    found = daemon.call(operations.LIST_LOADS)
    found.data = found.data[:limit]
    shown = output.Table([HEAD, *map(_row, found.data)]) if found.data else "Nothing was loaded yet."
    answer(found, shown, *_estimates_text(found.estimates), as_json=as_json)


def _estimates_text(estimates: LoadEstimates) -> list[output.Styled]:
    error, seconds, count = estimates.mean_error, estimates.mean_error_s, estimates.loads
    if error is None or seconds is None:
        return []
    loads = "1 load" if count == 1 else f"{count} loads"
    return [output.dim(f"Expected times were off by {seconds:.1f} s ({error:.0%}) on average, of {loads}.")]


def _row(one: Load) -> output.Row:
    return (
        one.id,
        one.worker,
        output.state(one.state),
        f"{one.progress:.0%}",
        *map(output.duration, (one.waited_s, one.took_s, one.expected_s, one.eta_s)),
        output.clock(one.asked_at),
        output.text(one.stage if one.state == "loading" and one.stage else one.reason),
    )


@loads.command("cancel")
@click.argument("number", metavar="LOAD")
@daemon_options
def loads_cancel(number: str, daemon: Client, as_json: bool) -> None:
    """Cancel LOAD, wherever it stands. Requests that wait for it get an error; the next one loads the model again."""
    load = daemon.call(operations.CANCEL_LOAD, id=number)
    answer(load, f"The load of {load.model} is cancelled.", as_json=as_json)
