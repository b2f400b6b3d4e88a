"""`llmux token`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from supervisor.cli.options import json_option, print_json

OPERATIONS = ("model-load", "model-unload", "cache-flush")


@click.group()
def token() -> None:
    """Sign operations of the runner API."""


@token.command("sign")
@click.argument("operation", type=click.Choice(OPERATIONS), required=False)
@click.option(
    "-f",
    "--field",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="A field of the request, e.g. modelId=chat; its value is JSON, else text.",
)
@click.option("--signer", "signers", multiple=True, help="Who signs; give all of them, once each.")
@click.option(
    "--key", "key_file", type=click.Path(path_type=Path), help="The key. Default: /etc/safebox/model-api.key."
)
@click.option("--as", "own", metavar="SIGNER", help="Sign for this one alone, with a key of its own.")
@click.option("--token", "begun", metavar="TOKEN", help="Add a signature to this token, that another signer has begun.")
@json_option
def token_sign(
    operation: str | None,
    assignments: tuple[str, ...],
    signers: tuple[str, ...],
    key_file: Path | None,
    own: str | None,
    begun: str | None,
    as_json: bool,
) -> None:
    """Print a token for `verifiedOpToken`, good for five minutes and one use.

    Give OPERATION, every field of its request, and every --signer. With one shared key that is all. Where
    each signer has a key of its own, the first one names all of them and signs --as himself; each of the others adds his
    signature to that --token.
    """
    from supervisor.catalog.sections.governance import KEY_FILE, read_key  # noqa: PLC0415  # not for declaring
    from supervisor.daemon import op_tokens  # noqa: PLC0415  # as above

    if (operation is None) == (begun is None):
        raise click.UsageError("Give an OPERATION, or a --token to which a signature is added.")
    if operation is not None and not signers:
        raise click.UsageError("Name each --signer: a token that nobody has signed is refused.")
    path = key_file or KEY_FILE
    try:
        key = read_key(path)
        found = (
            op_tokens.begin(operation, _parse_fields(assignments), signers)
            if operation
            else op_tokens.parse_token(begun)
        )
        signed = op_tokens.with_signature(found, key, own)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{error.strerror}: {path}" if isinstance(error, OSError) else str(error)) from error
    if as_json:
        print_json(signed)
    else:
        click.echo(op_tokens.to_text(signed))


def _parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words; a value that is no JSON is text."""
    fields = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"expected NAME=VALUE, got {each!r}", param_hint="--field")
        if name in fields:
            raise click.BadParameter(f"{name} is given twice", param_hint="--field")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
