"""`llmux man` and `llmux version`."""

from __future__ import annotations

import sys

import click

from supervisor.cli.options import answer, json_option, print_json

INSTALL = "llmux man > ~/.local/share/man/man1/llmux.1"


@click.command()
@json_option
@click.pass_context
def man(ctx: click.Context, as_json: bool) -> None:
    """Print the manual page, for `man`; into ~/.local/share/man/man1/llmux.1 with it."""
    from supervisor.cli import manual  # noqa: PLC0415  # not for declaring

    main = ctx.find_root().command
    assert isinstance(main, click.Group)
    page = manual.page(main)
    if as_json:
        print_json({"setup": INSTALL, "page": page})
        return
    click.echo(page, nl=False)
    if sys.stdout.isatty():
        click.echo(f"Use it: {INSTALL}", err=True)


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the version."""
    from supervisor.io import distribution  # noqa: PLC0415  # not for declaring

    found = distribution.version()
    answer({"version": found}, f"llmux, version {found}", as_json=as_json)
