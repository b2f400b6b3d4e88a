"""`llmux top`: devices, models and requests on one screen, repainted every second."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client
from supervisor.cli.commands import models
from supervisor.cli.exit_codes import UnreachableError
from supervisor.cli.options import daemon_options, print_json
from supervisor.core.demand import NORMAL

if TYPE_CHECKING:
    from supervisor.schema.memory import Device, Lease
    from supervisor.schema.model import ModelView
    from supervisor.schema.request import ActiveRequest

REQUESTS = 20

Page = list[output.Words | output.Table]


@click.command()
@click.option("--once", is_flag=True, help="Show it once and exit; --json does this, too.")
@click.option(
    "--interval", type=click.FloatRange(0.2, 60.0), default=1.0, show_default=True, help="Seconds between updates."
)
@daemon_options
def top(once: bool, interval: float, daemon: Client, as_json: bool) -> None:
    """Watch devices, models and requests until q or Ctrl-C."""
    if as_json:
        print_json(look(daemon))
        return
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        output.show(*page(look(daemon), daemon.url))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restores the terminal as Ctrl-C does
    with contextlib.suppress(KeyboardInterrupt), output.screen() as paint, _unbuffered_keys():
        while True:
            try:
                shown = page(look(daemon), daemon.url)
            except UnreachableError as error:  # the daemon may come back
                shown = [error.message]
            paint([*shown, "", output.dim("q: quit")])
            if _is_quit_pressed(interval):
                return


@dataclass(frozen=True, slots=True)
class Overview:
    """The values that the screen shows."""

    devices: list[Device]
    models: list[ModelView]
    leases: list[Lease]
    requests: list[ActiveRequest]


def look(daemon: Client) -> Overview:
    return Overview(
        daemon.call(operations.READ_MEMORY).devices,
        daemon.call(operations.LIST_MODELS).data,
        daemon.call(operations.LIST_LEASES).data,
        daemon.call(operations.LIST_REQUESTS).data,
    )


def page(seen: Overview, url: str) -> Page:
    found, requests, devices = seen.models, seen.requests, seen.devices
    loaded = sum(model.worker is not None for model in found)
    running = sum(request.state == "running" for request in requests)
    title = f"llmux {url}  {time.strftime('%H:%M:%S')}"
    counts = f"{loaded} of {len(found)} models loaded, {running} requests running, {len(requests) - running} queued"
    shown: Page = [[(title, "bold"), f"  {counts}"], ""]
    if devices:
        shown.append(output.Table([_device_row(device) for device in devices], head=False))
        for device in devices:
            if device.blocked:
                word = "quarantined" if device.quarantined else "blocked"
                shown.append((f"{device.id} is {word}: {device.blocked}", "red"))
        shown.append("")
    shown.append(models.table_of(found))
    shown += models.leases_of(seen.leases)
    if requests:
        shown += ["", _requests_table(requests)]
        if len(requests) > REQUESTS:
            shown.append(f"… and {len(requests) - REQUESTS} more")
    return shown


def _device_row(device: Device) -> output.Row:
    total, free = device.total_mib, device.free_mib
    share = 1 - free / total if total and free is not None else 0.0
    used = f"{output.mib(total - (free or 0))} of {output.mib(total)} used"
    leased, outside = sum(lease.lease_mib for lease in device.leases), device.outside_mib or 0
    rest = f"{output.mib(leased)} leased, {output.mib(outside)} outside, {output.mib(device.available_mib)} available"
    return (
        device.id,
        output.Bar(share, "red" if share > 0.95 else "yellow" if share > 0.8 else "green"),
        f"{used}, {rest}",
        output.dim(device.name or device.kind),
    )


def _requests_table(requests: list[ActiveRequest]) -> output.Table:
    head = ("REQUEST", "STATE", "AGE", "SENT", "CLIENT", "PRIORITY", "MODEL", "PATH")
    rows = [
        (
            request.request_id,
            request.state,
            output.duration(request.age_s),
            f"{request.bytes / 1024:.1f} KiB",
            output.text(request.tenant or request.key),
            output.text(None if request.priority == NORMAL else request.priority),
            output.text(request.model),
            request.path,
        )
        for request in requests[:REQUESTS]
    ]
    return output.Table([head, *rows])


@contextlib.contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Let the terminal deliver each key at once, without echo, until the block ends."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit_pressed(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in {b"q", b"Q", b""}
