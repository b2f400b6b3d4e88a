"""`llmux clients`: who asked, how often, and who has to pause."""

from __future__ import annotations

import click

from supervisor.cli import client, output
from supervisor.cli.client import Client, Json
from supervisor.cli.options import answer, daemon_options

PATH = "/v1/admin/clients"
HEAD = ("CLIENT", "NOW", "REQUESTS", "ERRORS", "REFUSED", "TOKENS IN / OUT", "LAST SEEN", "PROFILE", "PAUSE")


@click.group()
def clients() -> None:
    """Show the clients and what they asked; let one pause, or forget it."""


@clients.command("list")
@daemon_options
def clients_list(daemon: Client, as_json: bool) -> None:
    """Show each client: what it asked, what came of it, its profile, and whether it has to pause."""
    found = daemon.get(PATH)
    told = client.rows(found)
    shown = output.Table([HEAD, *map(_row, told)]) if told else "No client has said who it is, and none has a profile."
    answer(found, shown, as_json=as_json)


def _row(one: Json) -> output.Row:
    tokens = (output.text(one.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    profile = client.part(one, "profile")
    told = [f"{key} {profile[key]}" for key in ("model", "priority") if profile.get(key) is not None]
    pause = [output.duration(one.get("cooldown_s")), ": ", output.text(one.get("cooldown_reason"))]
    return (
        output.text(one.get("id")),
        *(output.text(one.get(name)) for name in ("in_flight", "requests", "errors", "refused")),
        " / ".join(tokens),
        output.clock(one.get("last_seen")) if one.get("last_seen") is not None else "never",
        ", ".join(told) or ("yes" if profile else "-"),
        "".join(pause) if one.get("cooldown_s") is not None else "-",
    )


_argument = click.argument("name", metavar="CLIENT")


@clients.command("pause")
@_argument
@click.option(
    "--seconds", type=click.FloatRange(0, 86_400, min_open=True), default=60.0, show_default=True, help="For how long."
)
@daemon_options
def clients_pause(name: str, seconds: float, daemon: Client, as_json: bool) -> None:
    """Let CLIENT pause: its requests get 429 until then. Those that run go on."""
    told = daemon.put(f"{PATH}/{client.quoted(name)}", {"cooldown_s": seconds})
    answer(told, f"{name} pauses for {output.duration(seconds)}.", as_json=as_json)


@clients.command("resume")
@_argument
@daemon_options
def clients_resume(name: str, daemon: Client, as_json: bool) -> None:
    """End the pause of CLIENT."""
    told = daemon.put(f"{PATH}/{client.quoted(name)}", {"cooldown_s": 0})
    answer(told, f"{name} may go on.", as_json=as_json)


@clients.command("forget")
@_argument
@daemon_options
def clients_forget(name: str, daemon: Client, as_json: bool) -> None:
    """Count CLIENT anew, and end its pause."""
    told = daemon.delete(f"{PATH}/{client.quoted(name)}")
    answer(told, f"{name} is forgotten.", as_json=as_json)
