"""`llmux service`."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path

import click

from supervisor.cli import operations
from supervisor.cli.client import Client
from supervisor.cli.options import config_path, daemon_options, json_option, print_json


@click.group()
def service() -> None:
    """Run llmux as a systemd user service."""


def _print_steps(as_json: bool, do: Callable[[Callable[[str], None]], None]) -> None:
    steps: list[str] = []
    do(steps.append if as_json else click.echo)
    if as_json:
        print_json({"steps": steps})


@service.command("install")
@config_path
@click.option("--linger", is_flag=True, help="Let it start at boot and outlive your logout.")
@click.option("--no-start", is_flag=True, help="Write and enable it, but don't start it.")
@click.option(
    "--socket", "address", metavar="HOST:PORT", help="Let systemd listen there and start llmux at the first connection."
)
@json_option
def service_install(config: Path | None, linger: bool, no_start: bool, address: str | None, as_json: bool) -> None:
    """Write the user unit, enable it and start it; print each step."""
    from supervisor.cli import service as systemd  # noqa: PLC0415  # not for declaring

    listen = _parse_address(address) if address is not None else None
    _print_steps(
        as_json,
        lambda echo: systemd.install(echo, config=config, linger=linger, start=not no_start, address=listen),
    )


def _parse_address(text: str) -> tuple[str, int]:
    """Parse an address that systemd can listen on. Raises BadParameter, also for a host name: systemd resolves none."""
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = ""
    if not (host and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        message = f"expected HOST:PORT with an IP address, such as 127.0.0.1:8081 or [::1]:8081, got {text!r}"
        raise click.BadParameter(message, param_hint="--socket")
    return host, int(port)


@service.command("upgrade")
@daemon_options
def service_upgrade(daemon: Client, as_json: bool) -> None:
    """Replace the running daemon by the llmux that is installed now, without a failed request or a reloaded model.

    It starts with its present configuration. If it can't, the old daemon goes on.
    """
    if not as_json:
        click.echo("starting the new daemon; loads that are under way end first")
    answer = daemon.call(operations.UPGRADE_DAEMON)
    if as_json:
        print_json(answer)
        return
    click.echo(f"the new daemon serves (pid {answer.pid})")
    if answer.running:
        click.echo(f"the old one ends after the requests that run on it: {answer.running}")


@service.command("uninstall")
@json_option
def service_uninstall(as_json: bool) -> None:
    """Stop and disable it, and remove the units."""
    from supervisor.cli import service as systemd  # noqa: PLC0415  # not for declaring

    _print_steps(as_json, systemd.uninstall)


@service.command("status")
@json_option
def service_status(as_json: bool) -> None:
    """Show what systemd reports about it."""
    from supervisor.cli import service as systemd  # noqa: PLC0415  # not for declaring

    facts = systemd.status(click.echo if not as_json else lambda _line: None)
    if as_json:
        print_json(facts)
