"""`llmux top`: devices, models and requests on one screen, painted anew every second.

Plain escape sequences on the terminal's other screen, so that what was there comes back at the end.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator

import click

from supervisor.cli import client, models, show
from supervisor.cli.client import Json
from supervisor.cli.exits import UnreachableError

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
REQUESTS = 20


def look(url: str, key: str | None) -> Json:
    """Everything that is shown, as the daemon says it."""
    return {
        "devices": client.get(url, key, "/v1/admin/gpu-memory").get("devices"),
        "models": client.get(url, key, "/v1/admin/models").get("data"),
        "requests": client.get(url, key, "/v1/admin/requests").get("data"),
    }


def watch(url: str, key: str | None, *, interval_s: float, once: bool) -> None:
    """Paint until q or Ctrl-C; once where it is asked for or the output is no terminal."""
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        click.echo("\n".join(page(look(url, key), url)))
        return
    with _screen(), contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                lines = page(look(url, key), url)
            except UnreachableError as error:  # it may come back
                lines = [error.message]
            _paint([*lines, "", show.dim("q: quit")])
            if _quits_within(interval_s):
                return


def page(seen: Json, url: str) -> list[str]:
    """The screen's lines."""
    found, requests = client.rows(seen, "models"), client.rows(seen, "requests")
    loaded = sum(model.get("worker") is not None for model in found)
    running = sum(request.get("state") == "running" for request in requests)
    title = f"llmux {url}  {time.strftime('%H:%M:%S')}"
    counts = f"{loaded} of {len(found)} models loaded, {running} requests running, {len(requests) - running} queued"
    lines = [f"{click.style(title, bold=True)}  {counts}", ""]
    for device in client.rows(seen, "devices"):
        lines += _device(device)
    lines += ["", *models.table_of(found).splitlines()]
    if requests:
        lines += ["", *_requests(requests).splitlines()]
    return lines


def _device(device: Json) -> Iterator[str]:
    total, free, outside = (_amount(device.get(name)) for name in ("total_mib", "free_mib", "outside_mib"))
    leases = client.rows(device, "leases")
    leased = sum(_amount(lease.get("lease_mib")) for lease in leases)
    share = 1 - free / total if total and device.get("free_mib") is not None else 0.0
    name = show.text(device.get("name") or device.get("kind"))
    yield (
        f"{device.get('id')}  {_coloured_bar(share)}  {show.mib(total - free)} of {show.mib(total)} used, "
        f"{show.mib(leased)} leased, {show.mib(outside)} outside, {show.mib(device.get('available_mib'))} available"
        f"  {show.dim(name)}"
    )
    for flag in ("blocked", "quarantined"):
        if device.get(flag):
            yield click.style(f"      {flag}: {device[flag]}", fg="red")


def _coloured_bar(share: float) -> str:
    return click.style(show.bar(share), fg="red" if share > 0.95 else "yellow" if share > 0.8 else "green")


def _requests(requests: list[Json]) -> str:
    head = ("REQUEST", "STATE", "AGE", "SENT", "KEY", "MODEL", "PATH")
    rows = [
        (
            show.text(request.get("request_id")),
            show.text(request.get("state")),
            show.duration(request.get("age_s")),
            f"{_amount(request.get('bytes')) / 1024:.1f} KiB",
            show.text(request.get("key")),
            show.text(request.get("model")),
            show.text(request.get("path")),
        )
        for request in requests[:REQUESTS]
    ]
    rest = f"\n… and {len(requests) - REQUESTS} more" if len(requests) > REQUESTS else ""
    return show.table([head, *rows], width=show.terminal_width()) + rest


def _amount(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _paint(lines: list[str]) -> None:
    columns, rows = shutil.get_terminal_size()
    shown = [show.cut(line, columns) for line in lines[: rows - 1]]
    if click.get_current_context().color is False:
        shown = [click.unstyle(line) for line in shown]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\r\n" for line in shown) + CLEAR_BELOW)
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, keys read one by one; put back whatever happens."""
    before = termios.tcgetattr(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def _quits_within(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in {b"q", b"Q", b""}
