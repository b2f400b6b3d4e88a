"""`llmux ps`, `load`, `unload`: models in a table, and a progress line during a load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import click

from supervisor.cli import client, output
from supervisor.cli.client import Client, Json
from supervisor.cli.exit_codes import UnreachableError
from supervisor.cli.options import answer, daemon_options, model_argument
from supervisor.errors import AuthenticationError, ForbiddenError, LlmuxError, NotFoundError

HEAD = ("MODEL", "STATE", "DEVICE", "LEASE / MEASURED", "FLIGHT", "QUEUED", "IDLE", "UP", "ALSO")
WIDE = ("TYPE", "RUNTIME", "PRIORITY", "PIN", "PID", "PORT", "LOAD", "NEED", "UNLOAD", "CONTEXT")

MOST_WARNINGS = 3


def table_of(models: Sequence[Json], *, wide: bool = False) -> output.Table | str:
    if not models:
        return "No models are configured."
    rows: list[output.Row] = [(*HEAD, *(WIDE if wide else ()), "REASON")]
    rows += [
        (*_row(model, most_names=99 if wide else 2), *(_wide(model) if wide else ()), output.text(model.get("reason")))
        for model in models
    ]
    return output.Table(rows, whole=wide)


def warnings_of(models: Sequence[Json]) -> list[str]:
    """What is wrong with their memory: a line for what is wrong with one or with several, and few lines."""
    names: dict[str, list[str]] = {}
    for model in models:
        told = model.get("warnings")
        for one in told if isinstance(told, list) else []:
            names.setdefault(str(one), []).append(str(model.get("name")))
    lines = [f"warning: {', '.join(whose)}: {one}" for one, whose in names.items()]
    if (more := len(lines) - MOST_WARNINGS) > 1:
        lines[MOST_WARNINGS:] = [f"warning: {more} more; all of them: llmux config check"]
    return lines


def leases_of(leases: Sequence[Json]) -> list[output.Words | output.Table]:
    """The leases of partners, below an empty line; nothing where there are none."""
    head = ("LEASE", "STATE", "DEVICE", "LEASE / MEASURED", "PID", "EXPIRES", "REASON")
    rows = [
        (
            str(lease.get("id")),
            output.state(str(lease.get("state"))),
            output.text(" + ".join(map(str, devices)) if isinstance(devices := lease.get("devices"), list) else None)
            or "-",
            f"{output.mib(lease.get('vram_mib'))} / {output.mib(lease.get('measured_mib'))}",
            output.text(lease.get("pid")),
            output.duration(lease.get("expires_s")),
            output.text(lease.get("reason")),
        )
        for lease in leases
    ]
    return ["", output.Table([head, *rows])] if rows else []


def overrides(settings: Sequence[str]) -> Json:
    """`key=value` words; a value is JSON where it can be, else text."""
    found: Json = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"expected KEY=VALUE, got {word!r}", param_hint="--set")
        found[name] = value
        with contextlib.suppress(ValueError):
            found[name] = json.loads(value)
    return found


def _progress(daemon: Client, path: str) -> output.Row:
    """The progress of a load: state, time so far, and a bar where the end can be estimated."""
    try:
        model = daemon.get(path, timeout_s=2.0)
    except LlmuxError:  # the command itself reports it
        return ["waiting for the daemon"]
    cells: list[output.Cell] = [[f"{model.get('name')}: ", output.state(str(model.get("state")))]]
    elapsed, left = model.get("since_s"), model.get("eta_s")
    if isinstance(elapsed, int | float):
        if isinstance(left, int | float) and elapsed + left > 0:
            cells.append(output.Bar(elapsed / (elapsed + left)))
            cells.append(f"{output.duration(elapsed)} of about {output.duration(elapsed + left)}")
        else:
            cells.append(output.duration(elapsed))
    return [*cells, output.dim(output.text(model.get("reason")))]


def _row(model: Json, most_names: int) -> output.Row:
    memory, worker = client.part(model, "memory"), client.part(model, "worker")
    amounts = (memory.get("lease_mib"), memory.get("measured_mib"))
    told = model.get("virtual_models")
    names = [str(name) for name in told] if isinstance(told, list) else []
    return (
        str(model.get("name")),
        _state(model),
        _device(model),
        " / ".join(map(output.mib, amounts)) if amounts != (None, None) else "-",
        output.text(model.get("in_flight")),
        output.text(model.get("queued")),
        output.duration(model.get("idle_s")),
        output.duration(worker.get("uptime_s")),
        ", ".join((*names[:most_names], *([f"+{more}"] if (more := len(names) - most_names) > 0 else []))) or "-",
    )


def _device(model: Json) -> str:
    """Where it is; of several devices, with its part on each."""
    parts = client.part(client.part(model, "memory"), "parts")
    if len(parts) < 2:
        return "RAM (host)" if model.get("device") == "host" else output.text(model.get("device"))
    return " + ".join(f"{device} {output.mib(mib)}" for device, mib in parts.items())


def _state(model: Json) -> output.Styled:
    """With the number of its replicas in this state, where there are several."""
    word, replicas = str(model.get("state")), model.get("replicas")
    same = (
        [one for one in replicas if isinstance(one, dict) and one.get("state") == word]
        if isinstance(replicas, list)
        else []
    )
    return output.state(word, f"{word} ×{len(same)}" if len(same) > 1 else word)


def _wide(model: Json) -> output.Row:
    worker = client.part(model, "worker")
    return (
        output.text(model.get("type")),
        output.text(model.get("runtime")),
        output.text(model.get("priority")),
        "yes" if model.get("pin") else "no",
        output.text(worker.get("pid")),
        output.text(worker.get("port")),
        output.duration(model.get("load_s")),
        _need(model),
        output.duration(model.get("unload_s")),
        output.text(client.part(model, "sizing").get("text")).removeprefix("context "),
    )


def _need(model: Json) -> str:
    """What its next load is to lease, and where that figure comes from: where it is loaded, else on the first device."""
    if model.get("remote"):
        return "-"
    need, device = client.part(client.part(model, "memory"), "need"), model.get("device")
    footprint = client.part(need, str(device) if device in need else next(iter(need), ""))
    return f"{output.mib(footprint.get('mib'))} {footprint.get('source')}" if footprint else "-"


def _last_words(daemon: Client, path: str, model: str) -> str:
    """Where they are; nothing of a worker that has not run, or has said none."""
    try:
        return f"; its last words: llmux logs {model}" if daemon.text(f"{path}/logs?lines=1") else ""
    except LlmuxError:
        return ""


@click.command()
@click.option("--wide", is_flag=True, help="Show all columns, uncut.")
@daemon_options
def ps(wide: bool, daemon: Client, as_json: bool) -> None:
    """Show every model: state, device, memory, requests, its other names, and the reason of the last change."""
    found = daemon.get("/v1/admin/models")
    models = client.rows(found)
    leases = [] if as_json else leases_of(client.rows(daemon.get("/v1/admin/leases")))
    answer(found, table_of(models, wide=wide), *leases, *warnings_of(models), as_json=as_json)


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
    path, changed = f"/v1/admin/models/{client.quoted(model)}", overrides(settings)
    try:
        with output.progress(lambda: _progress(daemon, path)):
            found = daemon.post(f"{path}/load", {"overrides": changed} if changed else None)
    except (UnreachableError, NotFoundError, AuthenticationError, ForbiddenError):
        raise
    except LlmuxError as error:
        error.detail = (*error.detail, f"What happened: llmux why {model}{_last_words(daemon, path, model)}")
        raise
    except KeyboardInterrupt:  # ends the wait, not the load
        click.echo(f"Not waiting any longer. Look: llmux ps; stop it: llmux unload {model}", err=True)
        raise
    answer(found, table_of([found]), as_json=as_json)


@click.command()
@model_argument()
@click.option("--force", is_flag=True, help="Abort running requests instead of letting them finish.")
@daemon_options
def unload(model: str, force: bool, daemon: Client, as_json: bool) -> None:
    """Unload MODEL and wait until its memory is back."""
    path = f"/v1/admin/models/{client.quoted(model)}"
    with output.progress(lambda: _progress(daemon, path)):
        found = daemon.post(f"{path}/unload" + ("?force=true" if force else ""))
    answer(found, table_of([found]), as_json=as_json)
