"""`llmux logs`, `events` and `why`."""

from __future__ import annotations

import json
import time

import click

from supervisor.cli import client, operations, output
from supervisor.cli.client import Client, Json
from supervisor.cli.options import answer, daemon_options, model_argument, print_json

KINDS = ("decision", "model", "memory", "request", "alert", "reload", "load", "progress")


@click.command()
@model_argument()
@click.option("-f", "--follow", is_flag=True, help="Follow new lines until Ctrl-C.")
@click.option("-n", "--lines", default=200, show_default=True, type=click.IntRange(1, 100_000), help="How many lines.")
@daemon_options
def logs(model: str, follow: bool, lines: int, daemon: Client, as_json: bool) -> None:
    """Show the last log lines of MODEL's worker, running or not."""
    if follow:
        for event in daemon.events(operations.READ_LOGS.at({"lines": lines, "follow": True}, name=model)):
            if as_json:
                print_json({"line": event.data}, indent=None)
            else:
                click.echo(output.clean(click.unstyle(event.data)))
        return
    content = daemon.text(operations.READ_LOGS, {"lines": lines}, name=model)
    if as_json:
        print_json({"model": model, "lines": content.splitlines()})
    elif content:
        click.echo(output.clean(click.unstyle(content)), nl=not content.endswith("\n"))
    else:
        state = daemon.call(operations.GET_MODEL, name=model).state
        remedy = (
            f"its worker starts with: llmux load {model}" if state == "stopped" else f"it is {state}: llmux why {model}"
        )
        click.echo(f"{model} has written nothing; {remedy}", err=True)


def _complete_kinds(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last kind of a comma-separated list, for the shell; kinds in the list are not offered again."""
    before, comma, last = incomplete.rpartition(",")
    there = before.split(",")
    return [f"{before}{comma}{kind}" for kind in KINDS if kind.startswith(last) and kind not in there]


@click.command()
@click.option("--types", metavar="KIND,KIND", shell_complete=_complete_kinds, help=f"Only these: {', '.join(KINDS)}.")
@daemon_options
def events(types: str | None, daemon: Client, as_json: bool) -> None:
    """Print events as they happen, until Ctrl-C. With --json each line is an object."""
    wanted = [word.strip() for word in types.split(",")] if types is not None else list(KINDS)
    if unknown := [word for word in wanted if word not in KINDS]:
        raise click.BadParameter(f"there are {', '.join(KINDS)}, not {unknown[0]!r}", param_hint="--types")
    for event in daemon.events(operations.FOLLOW_EVENTS.at({"types": ",".join(wanted)})):
        data = json.loads(event.data)
        if as_json:
            print_json({"event": event.kind, "id": event.id, "data": data}, indent=None)
        else:  # a table row, because tables are never wrapped
            output.show(output.Table([[line(event.kind, data)]], head=False, whole=True))


@click.command()
@model_argument(required=False)
@click.option("-n", "--limit", default=30, show_default=True, type=click.IntRange(1, 1000), help="How many decisions.")
@click.option(
    "--request",
    metavar="ID",
    help="Tell what this request waited for: its number, or the x-request-id of its response. The last 1000 are known.",
)
@daemon_options
def why(model: str | None, limit: int, request: str | None, daemon: Client, as_json: bool) -> None:
    """Show the decisions about MODEL (or all models) and their reasons, or what one request waited for.

    Of a task, task:NAME, show which candidate a request would go to now, and why.
    """
    if request is not None:
        from supervisor.cli.why import story  # noqa: PLC0415  # not for declaring

        if model is not None:
            raise click.UsageError("Give a MODEL or a --request, not both.")
        found = daemon.call(operations.GET_REQUEST, id=request)
        answer(found, *story(found), as_json=as_json)
        return
    if model is not None and model.startswith(client.TASK):
        from supervisor.cli.why import choice  # noqa: PLC0415  # not for declaring

        task = daemon.call(operations.GET_TASK, name=model)
        answer(task, *choice(task), as_json=as_json)
        return
    decided = daemon.call(operations.LIST_DECISIONS, query={"limit": limit, "model": model})
    columns = [name for name in ("model", "kind", "reason") if name != "model" or model is None]
    rows: list[output.Row] = [
        (output.clock(decision.at), *(output.text(getattr(decision, name)) for name in columns))
        for decision in decided.data
    ]
    table = output.Table([("TIME", *map(str.upper, columns)), *rows], whole=True)
    about = [] if model is None or as_json else daemon.call(operations.GET_MODEL, name=model).warnings
    notes = [f"{model}: {warning}" for warning in about]
    answer(decided, table if rows else "Nothing was decided yet.", *notes, as_json=as_json)


def line(kind: str, data: Json) -> list[str | output.Styled]:
    at = data.get("at")
    when = output.clock(time.time() if at is None else at)
    return [f"{when}  ", (f"{kind:8}", "red" if kind == "alert" else "cyan"), "  ", *_event_text(kind, data)]


def _event_text(kind: str, data: Json) -> list[str | output.Styled]:
    match kind:
        case "decision":
            return [f"{output.text(data.get('model'))}: {data.get('kind')}: {data.get('reason')}"]
        case "model":
            name, state = data.get("name"), str(data.get("state"))
            numbers = f"{output.text(data.get('in_flight'))} in flight, {output.text(data.get('queued'))} queued"
            rest = f"  {numbers}  {data['reason']}" if "reason" in data else ""
            return [f"{name}: ", output.state(state), rest]
        case "memory":
            free = [
                f"{device.get('id')}: {output.mib(device.get('free_mib'))} free of {output.mib(device.get('total_mib'))}"
                for device in client.rows(data, "devices")
            ]
            return [", ".join(free)]
        case "request":
            return [_request_text(data)]
        case "load":
            state, progress = str(data.get("state")), data.get("progress")
            done = f"  {progress:.0%}" if state == "loading" and isinstance(progress, int | float) else ""
            left = f", about {output.duration(data['eta_s'])} left" if data.get("eta_s") is not None else ""
            return [f"{data.get('model')}: ", output.state(state), f"{done}{left}  {data.get('reason')}"]
        case "progress":
            return [f"{data.get('model')}: step {data.get('step')} of {data.get('steps')}  {data.get('request_id')}"]
        case "alert":
            return [f"{data.get('code')}: {data.get('message')}"]
        case _:
            return [json.dumps(data, ensure_ascii=False)]


def _request_text(data: Json) -> str:
    start = f"{output.text(data.get('model'))}: {data.get('path')} {data.get('state')}"
    if data.get("state") != "finished":
        return f"{start}  {data.get('request_id')}"
    facts = [f"{data.get('status')}", f"{data.get('total_ms')} ms"]
    if data.get("completion_tokens") is not None:
        facts.append(f"{data['completion_tokens']} completion tokens")
    facts += [str(data["error"])] if data.get("error") else []
    return f"{start}  {', '.join(facts)}  {data.get('request_id')}"
