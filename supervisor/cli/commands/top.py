"""`llmux top`: devices, models and requests on one screen, repainted every second."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

import click

from supervisor.cli import client, output
from supervisor.cli.client import Client, Json
from supervisor.cli.commands import models
from supervisor.cli.exit_codes import UnreachableError
from supervisor.cli.options import daemon_options, print_json
from supervisor.core.demand import NORMAL

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
    with contextlib.suppress(KeyboardInterrupt), output.screen() as paint, _keys():
        while True:
            try:
                shown = page(look(daemon), daemon.url)
            except UnreachableError as error:  # it may come back
                shown = [error.message]
            paint([*shown, "", output.dim("q: quit")])
            if _quits_within(interval):
                return


def look(daemon: Client) -> Json:
    return {
        "devices": daemon.get("/v1/admin/gpu-memory").get("devices"),
        "models": daemon.get("/v1/admin/models").get("data"),
        "leases": daemon.get("/v1/admin/leases").get("data"),
        "requests": daemon.get("/v1/admin/requests").get("data"),
    }


def page(seen: Json, url: str) -> Page:
    found, requests = client.rows(seen, "models"), client.rows(seen, "requests")
    loaded = sum(model.get("worker") is not None for model in found)
    running = sum(request.get("state") == "running" for request in requests)
    title = f"llmux {url}  {time.strftime('%H:%M:%S')}"
    counts = f"{loaded} of {len(found)} models loaded, {running} requests running, {len(requests) - running} queued"
    devices = client.rows(seen, "devices")
    shown: Page = [[(title, "bold"), f"  {counts}"], ""]
    if devices:
        shown.append(output.Table([_device(device) for device in devices], head=False))
        for device, flag in itertools.product(devices, ("blocked", "quarantined")):
            if device.get(flag):
                shown.append((f"{device.get('id')} is {flag}: {device[flag]}", "red"))
        shown.append("")
    shown.append(models.table_of(found))
    shown += models.leases_of(client.rows(seen, "leases"))
    if requests:
        shown += ["", _requests(requests)]
        if len(requests) > REQUESTS:
            shown.append(f"… and {len(requests) - REQUESTS} more")
    return shown


def _device(device: Json) -> output.Row:
    total, free, outside = (_amount(device.get(name)) for name in ("total_mib", "free_mib", "outside_mib"))
    leases = client.rows(device, "leases")
    leased = sum(_amount(lease.get("lease_mib")) for lease in leases)
    share = 1 - free / total if total and device.get("free_mib") is not None else 0.0
    used = f"{output.mib(total - free)} of {output.mib(total)} used"
    rest = f"{output.mib(leased)} leased, {output.mib(outside)} outside, {output.mib(device.get('available_mib'))} available"
    return (
        output.text(device.get("id")),
        output.Bar(share, "red" if share > 0.95 else "yellow" if share > 0.8 else "green"),
        f"{used}, {rest}",
        output.dim(output.text(device.get("name") or device.get("kind"))),
    )


def _requests(requests: list[Json]) -> output.Table:
    head = ("REQUEST", "STATE", "AGE", "SENT", "CLIENT", "PRIORITY", "MODEL", "PATH")
    rows = [
        (
            output.text(request.get("request_id")),
            output.text(request.get("state")),
            output.duration(request.get("age_s")),
            f"{_amount(request.get('bytes')) / 1024:.1f} KiB",
            output.text(request.get("tenant") or request.get("key")),
            output.text(None if request.get("priority") == NORMAL else request.get("priority")),
            output.text(request.get("model")),
            output.text(request.get("path")),
        )
        for request in requests[:REQUESTS]
    ]
    return output.Table([head, *rows])


def _amount(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys are read one by one and not echoed; restored when the block ends."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits_within(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in {b"q", b"Q", b""}
