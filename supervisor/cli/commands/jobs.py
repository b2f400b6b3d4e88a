"""`llmux jobs`: work that outlives the request that began it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client, Json
from supervisor.cli.exit_codes import ExitCode
from supervisor.cli.options import answer, daemon_options, print_json

if TYPE_CHECKING:
    from supervisor.schema.job import JobSummary

KINDS: Final = ("inference", "response", "batch", "line", "load", "pull")
STATES: Final = ("queued", "running", "completed", "failed", "cancelled", "expired", "interrupted")
HEAD: Final = ("JOB", "KIND", "MODEL", "STATE", "DONE", "LEFT", "CREATED", "OWNER", "WHY")


@click.group()
def jobs() -> None:
    """Show jobs of all kinds (inference, responses, batches, loads, pulls); wait for one, cancel some."""


@jobs.command("list")
@click.option(
    "--kind", type=click.Choice(KINDS), help="Only jobs of this kind; lines of batches are shown only with --kind line."
)
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--model", help="Only those of this model.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Show at most so many: first those that run, then those that wait, then the newest that ended.",
)
@daemon_options
def jobs_list(
    kind: str | None, state: str | None, model: str | None, limit: int, daemon: Client, as_json: bool
) -> None:
    """Show each job: how far it is, and why it waits or ended."""
    requested = {"kind": kind, "state": state, "model": model, "limit": limit}
    found = daemon.call(
        operations.LIST_ALL_JOBS, query={name: value for name, value in requested.items() if value is not None}
    )
    shown = output.Table([HEAD, *map(_row, found.data)]) if found.data else "There are no such jobs."
    more = [output.dim(f"There are more: --limit {min(1000, 5 * limit)}")] if found.has_more else []
    answer(found, shown, *more, as_json=as_json)


def _row(job: JobSummary) -> output.Row:
    return (
        job.id,
        job.kind,
        output.text(job.model),
        output.state(job.state),
        _percentage(job.progress),
        output.duration(job.eta_s),
        output.clock(job.created_at),
        output.text(job.owner),
        output.text(job.message),
    )


def _percentage(progress: float | None) -> str:
    return "-" if progress is None else f"{progress:.0%}"


@jobs.command("show")
@click.argument("job_id", metavar="JOB")
@daemon_options
def jobs_show(job_id: str, daemon: Client, as_json: bool) -> None:
    """Show all that is known of JOB."""
    job = daemon.call(operations.GET_ANY_JOB, id=job_id)
    fields = {name: getattr(job, name) for name in job.__struct_fields__ if name != "object"}
    times = {name: output.clock(fields[name]) for name in ("created_at", "started_at", "ended_at")}
    spans = {name: output.duration(fields[name]) for name in ("eta_s", "expected_s")}
    shown = fields | times | spans | {"progress": _percentage(job.progress)}
    answer(
        job, output.Table([(name, output.text(value)) for name, value in shown.items()], head=False), as_json=as_json
    )


@jobs.command("wait")
@click.argument("job_id", metavar="JOB")
@daemon_options
def jobs_wait(job_id: str, daemon: Client, as_json: bool) -> None:
    """Wait until JOB is over. The exit code is 0 if it completed, else 1. With --json each change is an object."""
    last: Json = {}
    with output.progress(lambda: _progress_row(last)):
        for event in daemon.events(operations.FOLLOW_ANY_JOB.at(id=job_id)):
            last.update(json.loads(event.data))
            if as_json:
                print_json(last, indent=None)
    state = last.get("state")
    if state is not None and not as_json:
        click.echo(f"{job_id} is {state}" + (f": {why}" if (why := last.get("message")) else ""))
    if last.get("ended_at") is None:
        raise click.ClickException(f"llmux ended before {job_id} was over; wait again: llmux jobs wait {job_id}")
    if state != "completed":
        raise click.exceptions.Exit(ExitCode.FAILED)


def _progress_row(job: Json) -> output.Row:
    share = job.get("progress")
    bar = output.Bar(share) if isinstance(share, int | float) else ""
    return (output.text(job.get("id")), output.text(job.get("state")), bar, output.text(job.get("message")))


@jobs.command("cancel")
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@daemon_options
def jobs_cancel(job_ids: tuple[str, ...], daemon: Client, as_json: bool) -> None:
    """Cancel each JOB, wherever it stands. Requests that wait for a load get an error."""
    cancelled = [daemon.call(operations.CANCEL_ANY_JOB, id=job_id) for job_id in job_ids]
    shown = [f"{job.id} is {'being cancelled' if job.ended_at is None else job.state}." for job in cancelled]
    answer(cancelled, *shown, as_json=as_json)
