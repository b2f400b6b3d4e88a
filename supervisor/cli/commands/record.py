"""`llmux record` and `llmux replay`."""

from __future__ import annotations

from pathlib import Path

import click

from supervisor.cli import output
from supervisor.cli.client import Client
from supervisor.cli.options import counted, daemon_options, json_option, print_json

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", type=_FILE)
@click.option("--seconds", type=click.IntRange(1, 86400), help="How long; by default until Ctrl-C.")
@daemon_options
def record(file: Path, seconds: int | None, daemon: Client, as_json: bool) -> None:
    """Record every event and decision of the scheduler into FILE, until Ctrl-C.

    The daemon spends nothing on it while nobody records. FILE has the names of models and devices and the reasons of
    decisions, and neither prompts nor keys.
    """
    from supervisor.cli import recording  # noqa: PLC0415  # not for declaring

    events = recording.record(daemon, file, seconds)
    if as_json:
        print_json({"file": str(file), "events": events})
    else:
        click.echo(f"{counted(events, 'event')} in {file}. Replay them: llmux replay {file}")


@click.command()
@click.argument("file", type=_FILE)
@click.option("-n", "--limit", default=30, show_default=True, type=click.IntRange(0, 1000), help="How many decisions.")
@json_option
def replay(file: Path, limit: int, as_json: bool) -> None:
    """Make the decisions recorded in FILE again, compare them, and show the last ones. Needs no daemon."""
    from supervisor.cli import recording  # noqa: PLC0415  # not for declaring

    events, seconds, decisions = recording.replayed(file)
    shown = decisions[-limit:] if limit else []
    if as_json:
        print_json({"events": events, "seconds": round(seconds, 3), "decisions": shown})
        return
    if shown:
        rows = [
            tuple(map(output.text, (f"{one['at']:.3f} s", one["model"], one["kind"], one["reason"]))) for one in shown
        ]
        output.show(output.Table([("AFTER", "MODEL", "KIND", "REASON"), *rows], whole=True))
    click.echo(f"{counted(events, 'event')} of {seconds:.1f} s: every decision came out the same.")
