"""`llmux completion`."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from supervisor.cli.options import json_option, print_json

PROGRAM = "llmux"
SETUPS = {
    "bash": 'eval "$(llmux completion bash)"    # into ~/.bashrc',
    "zsh": 'eval "$(llmux completion zsh)"    # into ~/.zshrc',
    "fish": "llmux completion fish > ~/.config/fish/completions/llmux.fish",
}


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
