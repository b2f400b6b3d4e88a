"""`llmux ps`, `load`, `unload`: models in a table, and a progress line during a load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client, Json
from supervisor.cli.exit_codes import UnreachableError
from supervisor.cli.options import answer, daemon_options, model_argument
from supervisor.errors import AuthenticationError, ForbiddenError, LlmuxError, NotFoundError

if TYPE_CHECKING:
    from supervisor.schema.memory import Lease
    from supervisor.schema.model import ModelView

HEAD = ("MODEL", "STATE", "DEVICE", "LEASE / MEASURED", "FLIGHT", "QUEUED", "IDLE", "UP", "ALSO")
WIDE = ("TYPE", "RUNTIME", "PRIORITY", "PIN", "PID", "PORT", "LOAD", "NEED", "UNLOAD", "CONTEXT")

MOST_WARNINGS = 3


def table_of(models: Sequence[ModelView], *, wide: bool = False) -> output.Table | str:
    if not models:
        return "No models are configured."
    rows: list[output.Row] = [(*HEAD, *(WIDE if wide else ()), "REASON")]
    rows += [
        (*_row(model, most_names=99 if wide else 2), *(_wide_columns(model) if wide else ()), output.text(model.reason))
        for model in models
    ]
    return output.Table(rows, whole=wide)


def warnings_of(models: Sequence[ModelView]) -> list[str]:
    """Warnings about the models' memory, in few lines: one line for a warning that several models share."""
    names: dict[str, list[str]] = {}
    for model in models:
        for one in model.warnings:
            names.setdefault(one, []).append(model.name)
    lines = [f"warning: {', '.join(whose)}: {one}" for one, whose in names.items()]
    if (more := len(lines) - MOST_WARNINGS) > 1:
        lines[MOST_WARNINGS:] = [f"warning: {more} more; all of them: llmux config check"]
    return lines


def leases_of(leases: Sequence[Lease]) -> list[output.Words | output.Table]:
    """The leases of partners, below an empty line; no parts without leases."""
    head = ("LEASE", "STATE", "DEVICE", "LEASE / MEASURED", "PID", "EXPIRES", "REASON")
    rows = [
        (
            lease.id,
            output.state(lease.state),
            " + ".join(lease.devices) or "-",
            f"{output.mib(lease.vram_mib)} / {output.mib(lease.measured_mib)}",
            output.text(lease.pid),
            output.duration(lease.expires_s),
            output.text(lease.reason),
        )
        for lease in leases
    ]
    return ["", output.Table([head, *rows])] if rows else []


def overrides(settings: Sequence[str]) -> Json:
    """Parse `key=value` words; a value that is no JSON is text."""
    found: Json = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"expected KEY=VALUE, got {word!r}", param_hint="--set")
        found[name] = value
        with contextlib.suppress(ValueError):
            found[name] = json.loads(value)
    return found


def _progress_row(daemon: Client, name: str) -> output.Row:
    """The progress of a load: state, time so far, and a bar where the end can be estimated."""
    try:
        model = daemon.call(operations.GET_MODEL, timeout_s=2.0, name=name)
    except LlmuxError:  # the command itself reports the error
        return ["waiting for the daemon"]
    cells: list[output.Cell] = [[f"{model.name}: ", output.state(model.state)]]
    elapsed, left = model.since_s, model.eta_s
    if left is not None and elapsed + left > 0:
        cells.append(output.Bar(elapsed / (elapsed + left)))
        cells.append(f"{output.duration(elapsed)} of about {output.duration(elapsed + left)}")
    else:
        cells.append(output.duration(elapsed))
    return [*cells, output.dim(output.text(model.reason))]


def _row(model: ModelView, most_names: int) -> output.Row:
    amounts, names = (model.memory.lease_mib, model.memory.measured_mib), model.virtual_models
    return (
        model.name,
        _state_text(model),
        _devices_text(model),
        " / ".join(map(output.mib, amounts)) if amounts != (None, None) else "-",
        str(model.in_flight),
        str(model.queued),
        output.duration(model.idle_s),
        output.duration(None if model.worker is None else model.worker.uptime_s),
        ", ".join((*names[:most_names], *([f"+{more}"] if (more := len(names) - most_names) > 0 else []))) or "-",
    )


def _devices_text(model: ModelView) -> str:
    """The devices of a model; for several devices with its memory on each."""
    parts = model.memory.parts
    if len(parts) < 2:
        return "RAM (host)" if model.device == "host" else output.text(model.device)
    return " + ".join(f"{device} {output.mib(mib)}" for device, mib in parts.items())


def _state_text(model: ModelView) -> output.Styled:
    """The model's state, with the number of replicas in this state where there are several."""
    same = [one for one in model.replicas if one.state == model.state]
    return output.state(model.state, f"{model.state} ×{len(same)}" if len(same) > 1 else model.state)


def _wide_columns(model: ModelView) -> output.Row:
    worker = model.worker
    return (
        model.type,
        model.runtime,
        str(model.priority),
        "yes" if model.pin else "no",
        output.text(None if worker is None else worker.pid),
        output.text(None if worker is None else worker.port),
        output.duration(model.load_s),
        _need_text(model),
        output.duration(model.unload_s),
        output.text(None if model.sizing is None else model.sizing.text).removeprefix("context "),
    )


def _need_text(model: ModelView) -> str:
    """The memory that the next load leases, and the source of that figure: for the model's device, else for the first one."""
    if model.remote:
        return "-"
    need = model.memory.need
    footprint = need.get(model.device or "") or next(iter(need.values()), None)
    return "-" if footprint is None else f"{output.mib(footprint.mib)} {footprint.source}"


def _log_hint(daemon: Client, model: str) -> str:
    """The command that shows the worker's last log lines; empty where the worker has written none."""
    try:
        return (
            f"; its last words: llmux logs {model}"
            if daemon.text(operations.READ_LOGS, {"lines": 1}, name=model)
            else ""
        )
    except LlmuxError:
        return ""


@click.command()
@click.option("--wide", is_flag=True, help="Show all columns, uncut.")
@daemon_options
def ps(wide: bool, daemon: Client, as_json: bool) -> None:
    """Show every model: state, device, memory, requests, its other names, and the reason of the last change."""
    found = daemon.call(operations.LIST_MODELS)
    leases = [] if as_json else leases_of(daemon.call(operations.LIST_LEASES).data)
    answer(found, table_of(found.data, wide=wide), *leases, *warnings_of(found.data), as_json=as_json)


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
    from supervisor.schema.model import LoadRequest  # noqa: PLC0415  # not for declaring

    body = LoadRequest(overrides(settings) or None)
    try:
        with output.progress(lambda: _progress_row(daemon, model)):
            found = daemon.call(operations.LOAD_MODEL, body, name=model)
    except (UnreachableError, NotFoundError, AuthenticationError, ForbiddenError):
        raise
    except LlmuxError as error:
        error.detail = (*error.detail, f"What happened: llmux why {model}{_log_hint(daemon, model)}")
        raise
    except KeyboardInterrupt:  # ends the wait; the load goes on
        click.echo(f"Not waiting any longer. Look: llmux ps; stop it: llmux unload {model}", err=True)
        raise
    answer(found, table_of([found]), as_json=as_json)


@click.command()
@model_argument()
@click.option("--force", is_flag=True, help="Abort running requests instead of letting them finish.")
@daemon_options
def unload(model: str, force: bool, daemon: Client, as_json: bool) -> None:
    """Unload MODEL and wait until its memory is back."""
    with output.progress(lambda: _progress_row(daemon, model)):
        found = daemon.call(operations.UNLOAD_MODEL, query={"force": force or None}, name=model)
    answer(found, table_of([found]), as_json=as_json)
