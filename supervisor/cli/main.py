"""The `llmux` command: the group that all commands belong to, and how it ends when something goes wrong.

Commands are declared in the modules of `commands`, a few lines each: arguments in, one call, a table or `--json` out.
Machines read stdout; what is said to people beside a result goes to stderr. Declaring costs nothing but click, so that
`llmux --help`, completion and `llmux ps` are quick; whatever a command needs is imported when it runs.
"""

from __future__ import annotations

import os
import sys

import click

from supervisor.cli import show
from supervisor.cli.commands import bench, chat, config, keys, models, pull, runtimes, serve, service, setup, watch
from supervisor.cli.exits import MEANINGS, Exit, exit_of
from supervisor.errors import ConfigError, LlmuxError

ROOMS = (serve, models, watch, chat, setup, config, keys, runtimes, pull, bench, service)


class _Group(click.Group):
    """Renders our errors: the message alone, no traceback. Lists commands in the order of their declaration."""

    def invoke(self, ctx: click.Context) -> object:
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        show.leave_rich_out()
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo("The configuration has mistakes:", err=True)
            for problem in error.problems:
                click.echo(f"  {show.clean(problem)}", err=True)
            sys.exit(exit_of(error))
        except LlmuxError as error:
            click.echo(f"llmux: {show.clean(error.message)}", err=True)
            for line in error.detail:
                click.echo(f"  {show.clean(line)}", err=True)
            sys.exit(exit_of(error))
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(Exit.INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning.replace("`", "")) for code, meaning in MEANINGS.items()])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llmux-supervisor", prog_name="llmux")
def main() -> None:
    """Run many AI models on too little memory, one worker process each, behind one OpenAI-compatible API."""


for room in ROOMS:
    for command in room.COMMANDS:
        main.add_command(command)

if __name__ == "__main__":
    main()
