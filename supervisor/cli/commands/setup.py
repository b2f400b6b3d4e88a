"""`llmux doctor` and `completion`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from supervisor.cli.exits import Exit
from supervisor.cli.options import config_path, json_option, print_json

PROGRAM = "llmux"
SETUPS = {
    "bash": 'eval "$(llmux completion bash)"    # into ~/.bashrc',
    "zsh": 'eval "$(llmux completion zsh)"    # into ~/.zshrc',
    "fish": "llmux completion fish > ~/.config/fish/completions/llmux.fish",
}


@click.command()
@config_path
@json_option
def doctor(config: Path | None, as_json: bool) -> None:
    """Check everything that llmux needs on this machine, and say how to mend what is wrong."""
    from supervisor.io.distribution import refuse_name_clashes  # noqa: PLC0415  # not for declaring

    try:
        from supervisor.cli import doctor as checks  # noqa: PLC0415  # as above
    except Exception:
        refuse_name_clashes()  # the imports may have met another package's `runtimes`
        raise
    from supervisor.cli import show  # noqa: PLC0415  # as above

    found = checks.examine(config)
    failed = any(check.status == "fail" for check in found)
    if as_json:
        print_json({"ok": not failed, "checks": [check.as_json() for check in found]})
    else:
        show.say(*checks.report(found))
    if failed:
        sys.exit(Exit.FAILED)


@click.command()
@click.argument("shell", type=click.Choice(list(SETUPS)))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print what makes SHELL complete commands, options, and names: of models, runtimes, keys and events."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # not for declaring

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "setup": SETUPS[shell].partition("    #")[0], "script": script})
        return
    click.echo(script)
    if sys.stdout.isatty():
        click.echo(f"Use it: {SETUPS[shell]}", err=True)


COMMANDS = (doctor, completion)
