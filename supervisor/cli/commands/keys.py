"""`llmux keys`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from supervisor.cli import output
from supervisor.cli.options import config_option, json_option, print_json
from supervisor.errors import LlmuxError

if TYPE_CHECKING:
    from supervisor.cli import keys as files


_AMOUNT = click.IntRange(1, 999_999_999)


@click.group()
def keys() -> None:
    """Make, show and revoke API keys."""


def file_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--config` and `--file`, which choose the file of keys."""
    command = click.option(
        "--file", "path", type=click.Path(path_type=Path), help="File of keys. Default: as configured."
    )(command)
    return config_option(command)


def _parse_priority(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | int | None:
    """The priority as the file of keys spells it: a word or a number."""
    from supervisor.core.demand import priority_of  # noqa: PLC0415  # not for declaring

    if text is None:
        return None
    try:
        number = priority_of(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return number if text.strip().isdecimal() else text.strip().lower()


@keys.command("add")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["inference", "admin", "metrics", "configure"]),
    multiple=True,
    help="What it allows; may be given several times. Default: inference; for the first key inference and admin.",
)
@click.option(
    "--expires", metavar="DATE", help="When it expires, such as 2030-01-31 or 2030-01-31T12:00:00Z. Default: never."
)
@click.option(
    "--load-feedback/--no-load-feedback",
    default=None,
    help="Its chat streams show, as reasoning, that a model loads and how long that takes. Default: as server.load_feedback says.",
)
@click.option(
    "--priority",
    callback=_parse_priority,
    help="Priority of its requests that name none: high, normal, low, or 0 (first) to 100. Default: normal.",
)
@click.option(
    "--priority-ceiling", callback=_parse_priority, help="None of its requests is more urgent than this. Default: 0."
)
@click.option("--tenant", help="The tenant of its requests. Default: NAME.")
@click.option("--for-others", is_flag=True, help="Its requests may name another tenant: for a gateway of many users.")
@click.option("--requests-per-minute", type=_AMOUNT, help="Requests it may send. Default: any number.")
@click.option("--tokens-per-minute", type=_AMOUNT, help="Tokens its requests may take. Default: any number.")
@click.option("--concurrency", type=_AMOUNT, help="Requests it may have waiting and running. Default: any number.")
@click.option(
    "--responses",
    type=click.Choice(["openai", "llm-pool"]),
    help="Whose requests to /v1/responses it sends, where their fields don't show it. Default: as server.responses says.",
)
@click.option(
    "--replaces",
    is_flag=True,
    help="It replaces the key called NAME, which then works no more: it has that key's jobs, kept responses and settings.",
)
@file_options
@json_option
def keys_add(
    name: str,
    scopes: tuple[str, ...],
    expires: str | None,
    load_feedback: bool | None,
    priority: str | int | None,
    priority_ceiling: str | int | None,
    tenant: str | None,
    for_others: bool,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrency: int | None,
    responses: str | None,
    replaces: bool,
    config: Path | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Make a key called NAME, add it to the file of keys, and print its secret, once."""
    from supervisor.catalog.keys import Scope  # noqa: PLC0415  # not for declaring
    from supervisor.catalog.sections.sections import TENANT_LIMIT  # noqa: PLC0415  # as above
    from supervisor.cli import keys as files  # noqa: PLC0415  # as above
    from supervisor.core.demand import priority_of  # noqa: PLC0415  # as above

    if not 0 < len(name.strip()) <= 100 or not name.isprintable():
        raise click.BadParameter("expected 1 to 100 characters that can be printed", param_hint="NAME")
    if expires is not None:
        _check_expiry(expires)
    if priority is not None and priority_ceiling is not None and priority_of(priority) < priority_of(priority_ceiling):
        raise click.BadParameter(
            f"{priority} is more urgent than the ceiling {priority_ceiling}", param_hint="--priority"
        )
    if tenant is not None and not (0 < len(tenant.strip()) <= TENANT_LIMIT and tenant.isprintable()):
        message = f"expected 1 to {TENANT_LIMIT} characters that can be printed"
        raise click.BadParameter(message, param_hint="--tenant")
    path = path or files.keys_file(config)
    wanted = tuple(Scope(scope) for scope in dict.fromkeys(scopes))
    more = {
        "load_feedback": load_feedback,
        "priority": priority,
        "priority_ceiling": priority_ceiling,
        "tenant": tenant,
        "for_others": for_others or None,
        "request_rate": None if requests_per_minute is None else f"{requests_per_minute}/min",
        "token_rate": None if tokens_per_minute is None else f"{tokens_per_minute}/min",
        "concurrency": concurrency,
        "responses": responses,
    }
    added = files.add(path, name, wanted, expires, replaces=replaces, **more)
    done = f"Replaced {name} in" if replaces else f"Added {name} to"
    click.echo(f"{done} {path}. This is the only time its key is shown. To use it: llmux reload", err=True)
    if added.is_first and not scopes:
        click.echo(
            "It is the first key, so it has the scopes inference and admin: keep it to yourself. Make others, for "
            "inference alone, for your clients: llmux keys add NAME",
            err=True,
        )
    elif not added.is_administered:
        click.echo(
            "No key has the scope admin: only llmux commands of this user on this machine can administrate. Make one for "
            "the dashboard and for other machines: llmux keys add NAME --scope admin",
            err=True,
        )
    if as_json:
        print_json(
            {
                "name": name,
                "key": added.secret,
                "scopes": added.scopes,
                "expires": expires,
                **more,
                "file": str(path),
            }
        )
    else:
        click.echo(added.secret)


def _check_expiry(text: str) -> None:
    from supervisor.catalog.keys import moment  # noqa: PLC0415  # not for declaring

    try:
        ends = moment(text)
    except (ValueError, OverflowError) as error:
        message = f"{text!r} is no date or time such as 2030-01-31 or 2030-01-31T12:00:00Z"
        raise click.BadParameter(message, param_hint="--expires") from error
    if ends <= time.time():
        message = f"{text} is over already, so the key would never work (a date ends at its first moment, in UTC)"
        raise click.BadParameter(message, param_hint="--expires")


_former_command = copy.copy(keys_add)  # the command's former name
_former_command.name, _former_command.hidden = "new", True
keys.add_command(_former_command)


@keys.command("list")
@file_options
@json_option
def keys_list(config: Path | None, path: Path | None, as_json: bool) -> None:
    """Show the keys' names, scopes, expiry, load feedback, priority, tenant and limits; never the keys."""
    from supervisor.cli import keys as files  # noqa: PLC0415  # not for declaring

    path = path or files.keys_file(config)
    rows = files.listing(path)
    if as_json:
        print_json({"file": str(path), "data": rows})
    elif rows:
        head = ("NAME", "SCOPES", "EXPIRES", "LOAD FEEDBACK", "PRIORITY", "TENANT", "LIMITS", "STATE")
        lines = [
            (
                row["name"],
                ", ".join(row["scopes"]),
                row["expires"] or "never",
                {True: "yes", False: "no", None: "default"}[row["load_feedback"]],
                _priority_text(row),
                ("others too, else " if row["for_others"] else "") + row["tenant"],
                _limits_text(row),
                output.state(row["state"]),
            )
            for row in rows
        ]
        output.show(output.Table([head, *lines], whole=True))
    else:
        click.echo(f"No keys in {path}; make one: llmux keys add NAME", err=True)


def _priority_text(row: files.Listed) -> str:
    """The default priority, and the most urgent one that requests may name."""
    from supervisor.core.demand import MOST_URGENT, NORMAL  # noqa: PLC0415  # not for declaring

    ceiling = row["priority_ceiling"]
    default = max(ceiling, NORMAL if row["priority"] is None else row["priority"])
    return f"{default}" if ceiling == MOST_URGENT else f"{default}, at most {ceiling}"


def _limits_text(row: files.Listed) -> str:
    limits = (
        row["request_rate"] and f"{row['request_rate']} requests",
        row["token_rate"] and f"{row['token_rate']} tokens",
        None if row["concurrency"] is None else f"{row['concurrency']} at once",
    )
    return ", ".join(filter(None, limits)) or "none"


def _complete_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The names of the keys, for the shell's completion."""
    from supervisor.cli import keys as files  # noqa: PLC0415  # not for declaring

    try:
        rows = files.listing(ctx.params.get("path") or files.keys_file(ctx.params.get("config")))
    except (LlmuxError, OSError):
        return []
    return [row["name"] for row in rows if row["name"].startswith(incomplete)]


@keys.command("revoke")
@click.argument("name", shell_complete=_complete_names)
@file_options
@json_option
def keys_revoke(name: str, config: Path | None, path: Path | None, as_json: bool) -> None:
    """Take the key called NAME out of the file of keys."""
    from supervisor.cli import keys as files  # noqa: PLC0415  # not for declaring

    path = path or files.keys_file(config)
    left, kept_layout = files.revoke(path, name)
    click.echo(
        f"Revoked {name} in {path}. It still works until the next llmux reload, which ends it even if it finds mistakes.",
        err=True,
    )
    if not kept_layout:
        click.echo("The file was rewritten; its comments are lost.", err=True)
    if not left:
        click.echo(
            "That was the last key: without keys, only this machine is served, and every program on it.", err=True
        )
    if as_json:
        print_json({"name": name, "file": str(path), "left": left})
