"""`llmux man`, `completion` and `version`."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from supervisor.cli.options import answer, json_option, print_json

INSTALL = "llmux man > ~/.local/share/man/man1/llmux.1"
PROGRAM = "llmux"
SETUPS = {
    "bash": 'eval "$(llmux completion bash)"    # into ~/.bashrc',
    "zsh": 'eval "$(llmux completion zsh)"    # into ~/.zshrc',
    "fish": "llmux completion fish > ~/.config/fish/completions/llmux.fish",
}


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
@click.argument("shell", type=click.Choice(list(SETUPS)))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the script with which SHELL completes commands, options, and names of models, runtimes, keys and events."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "setup": SETUPS[shell].partition("    #")[0], "script": script})
        return
    click.echo(script)
    if sys.stdout.isatty():
        click.echo(f"Use it: {SETUPS[shell]}", err=True)


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the version."""
    from supervisor.host import distribution  # noqa: PLC0415  # not for declaring

    found = distribution.version()
    answer({"version": found}, f"llmux, version {found}", as_json=as_json)
