"""`llmux ps`, `load`, `unload`: models in a table, and the wait for a load with what is known of its length."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import click

from supervisor.cli import client, show
from supervisor.cli.client import Json
from supervisor.cli.exits import UnreachableError
from supervisor.errors import AuthenticationError, ForbiddenError, LlmuxError, NotFoundError

HEAD = ("MODEL", "STATE", "DEVICE", "LEASE / MEASURED", "FLIGHT", "QUEUED", "IDLE", "UP")
WIDE = ("TYPE", "RUNTIME", "PRIORITY", "PIN", "PID", "PORT", "LOAD", "ALSO")


def table_of(models: Sequence[Json], *, wide: bool = False) -> show.Table | str:
    """Models as a table that fits the terminal, or all of it."""
    if not models:
        return "No models are configured."
    rows: list[show.Row] = [(*HEAD, *(WIDE if wide else ()), "REASON")]
    rows += [(*_row(model), *(_wide(model) if wide else ()), show.text(model.get("reason"))) for model in models]
    return show.Table(rows, whole=wide)


def load(url: str, key: str | None, model: str, overrides: Json) -> Json:
    """Load it; meanwhile tell on a terminal how far it is. Ctrl-C ends the wait, not the load."""
    path = f"/v1/admin/models/{client.quoted(model)}"
    body: Json | None = {"overrides": overrides} if overrides else None
    try:
        with show.progress(lambda: _progress(url, key, path)):
            return client.post(url, key, f"{path}/load", body)
    except (UnreachableError, NotFoundError, AuthenticationError, ForbiddenError):
        raise
    except LlmuxError as error:
        error.detail = (*error.detail, f"What happened: llmux why {model}; its last words: llmux logs {model}")
        raise
    except KeyboardInterrupt:
        click.echo(f"Not waiting any longer. Look: llmux ps; stop it: llmux unload {model}", err=True)
        raise


def unload(url: str, key: str | None, model: str, *, force: bool) -> Json:
    """Unload it; meanwhile tell on a terminal what it waits for."""
    path = f"/v1/admin/models/{client.quoted(model)}"
    with show.progress(lambda: _progress(url, key, path)):
        return client.post(url, key, f"{path}/unload" + ("?force=true" if force else ""))


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


def progress_line(model: Json) -> show.Row:
    """How far a load is: state, time so far, and a bar where the end can be guessed."""
    cells: list[show.Cell] = [[f"{model.get('name')}: ", show.state(str(model.get("state")))]]
    elapsed, left = model.get("since_s"), model.get("eta_s")
    if isinstance(elapsed, int | float):
        if isinstance(left, int | float) and elapsed + left > 0:
            cells.append(show.Bar(elapsed / (elapsed + left)))
            cells.append(f"{elapsed:.0f} s of about {elapsed + left:.0f} s")
        else:
            cells.append(f"{elapsed:.0f} s")
    return [*cells, show.dim(show.text(model.get("reason")))]


def _progress(url: str, key: str | None, path: str) -> show.Row:
    try:
        return progress_line(client.get(url, key, path, timeout_s=2.0))
    except LlmuxError:  # the command itself tells it
        return ["waiting for the daemon"]


def _row(model: Json) -> show.Row:
    memory, worker = client.part(model, "memory"), client.part(model, "worker")
    amounts = (memory.get("lease_mib"), memory.get("measured_mib"))
    return (
        str(model.get("name")),
        show.state(str(model.get("state"))),
        show.text(model.get("device")),
        " / ".join(map(show.mib, amounts)) if amounts != (None, None) else "-",
        show.text(model.get("in_flight")),
        show.text(model.get("queued")),
        show.duration(model.get("idle_s")),
        show.duration(worker.get("uptime_s")),
    )


def _wide(model: Json) -> show.Row:
    worker, names = client.part(model, "worker"), model.get("virtual_models")
    return (
        show.text(model.get("type")),
        show.text(model.get("runtime")),
        show.text(model.get("priority")),
        "yes" if model.get("pin") else "no",
        show.text(worker.get("pid")),
        show.text(worker.get("port")),
        show.duration(model.get("load_s")),
        ", ".join(map(str, names)) if isinstance(names, list) and names else "-",
    )
