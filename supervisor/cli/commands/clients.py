"""`llmux clients`: the clients, the number of their requests, and their pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client
from supervisor.cli.options import answer, daemon_options

if TYPE_CHECKING:
    from supervisor.schema import client as schema

HEAD = ("CLIENT", "NOW", "REQUESTS", "ERRORS", "REFUSED", "TOKENS IN / OUT", "LAST SEEN", "PROFILE", "PAUSE")


@click.group()
def clients() -> None:
    """Show the clients and what they asked; let one pause, or forget it."""


@clients.command("list")
@daemon_options
def clients_list(daemon: Client, as_json: bool) -> None:
    """Show each client: what it asked, what came of it, its profile, and whether it has to pause."""
    found = daemon.call(operations.LIST_CLIENTS)
    shown = (
        output.Table([HEAD, *map(_row, found.data)])
        if found.data
        else "No client has said who it is, and none has a profile."
    )
    answer(found, shown, as_json=as_json)


def _row(one: schema.Client) -> output.Row:
    profile = one.profile or {}
    words = [f"{key} {profile[key]}" for key in ("model", "priority") if profile.get(key) is not None]
    return (
        one.id,
        *map(str, (one.in_flight, one.requests, one.errors, one.refused)),
        f"{one.prompt_tokens} / {one.completion_tokens}",
        "never" if one.last_seen is None else output.clock(one.last_seen),
        ", ".join(words) or ("yes" if profile else "-"),
        "-" if one.cooldown_s is None else f"{output.duration(one.cooldown_s)}: {output.text(one.cooldown_reason)}",
    )


_argument = click.argument("name", metavar="CLIENT")


@clients.command("pause")
@_argument
@click.option(
    "--seconds", type=click.FloatRange(0, 86_400, min_open=True), default=60.0, show_default=True, help="For how long."
)
@daemon_options
def clients_pause(name: str, seconds: float, daemon: Client, as_json: bool) -> None:
    """Let CLIENT pause: its new requests get 429 for that time. Running ones go on."""
    found = daemon.call(operations.PAUSE_CLIENT, {"cooldown_s": seconds}, id=name)
    answer(found, f"{name} pauses for {output.duration(seconds)}.", as_json=as_json)


@clients.command("resume")
@_argument
@daemon_options
def clients_resume(name: str, daemon: Client, as_json: bool) -> None:
    """End the pause of CLIENT."""
    found = daemon.call(operations.PAUSE_CLIENT, {"cooldown_s": 0}, id=name)
    answer(found, f"{name} may go on.", as_json=as_json)


@clients.command("forget")
@_argument
@daemon_options
def clients_forget(name: str, daemon: Client, as_json: bool) -> None:
    """Count CLIENT anew, and end its pause."""
    found = daemon.call(operations.FORGET_CLIENT, id=name)
    answer(found, f"{name} is forgotten.", as_json=as_json)
