"""`llmux lease`: run another program's command with leased memory, which no model takes meanwhile."""

from __future__ import annotations

import re
import sys
from pathlib import PurePath

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client
from supervisor.cli.options import daemon_options, print_json
from supervisor.errors import LlmuxError

_STRANGE = re.compile(r"[^A-Za-z0-9._-]+")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--vram-mib", required=True, type=click.IntRange(min=1), help="How much memory, on all GPUs together.")
@click.option("--device", "devices", multiple=True, help="Only on this device; may be given several times.")
@click.option("--gpus", default=1, show_default=True, type=click.IntRange(1, 64), help="Share it by so many GPUs.")
@click.option("--wait", is_flag=True, help="Wait for busy models and other leases. Without, fail at once.")
@click.option("--holder", help="Name of the lease's holder, for lists and reasons. Default: the command's name.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@daemon_options
def lease(
    vram_mib: int,
    devices: tuple[str, ...],
    gpus: int,
    wait: bool,
    holder: str | None,
    command: tuple[str, ...],
    daemon: Client,
    as_json: bool,
) -> None:
    """Lease memory for COMMAND, run it, and give the memory back when it ends. Exits as COMMAND does.

    Idle models are evicted for it. COMMAND sees only the devices of its lease. It is killed with llmux lease, and when its
    lease is lost. Put -- before COMMAND. With --json the lease is printed on stderr.
    """
    whose = holder or _STRANGE.sub("-", PurePath(command[0]).name).strip("-._")[:64] or "partner"
    from supervisor.schema.memory import LeaseRequest  # noqa: PLC0415  # not for declaring

    body = LeaseRequest(vram_mib, whose, list(devices) or None, gpus, wait)
    with output.progress(lambda: _progress_row(daemon, whose)):
        found = daemon.call(operations.TAKE_LEASE, body)
    if as_json:
        print_json(found, indent=None, err=True)
    from supervisor.cli.leased import run  # noqa: PLC0415  # not for declaring

    sys.exit(run(daemon, found, command))


def _progress_row(daemon: Client, holder: str) -> output.Row:
    try:
        leases = daemon.call(operations.LIST_LEASES, timeout_s=2.0).data
    except LlmuxError:  # the command itself reports the error
        return ["waiting for the daemon"]
    reasons = (one.reason for one in leases if one.holder == holder and one.state == "waiting")
    return [f"{holder} waits: ", output.dim(output.text(next(reasons, None)))]
