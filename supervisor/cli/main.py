"""The `llmux` command: the group of all commands, and how an error becomes a message and an exit code.

The modules of `commands` declare the commands, a few lines each: arguments in, one call, a table or `--json` out.
Results go to stdout, messages for people to stderr. A declaration imports only click, so that `llmux --help`,
completion and `llmux ps` start quickly; a command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys

import click

from supervisor.cli import output
from supervisor.cli.commands import (
    bench,
    chat,
    completion,
    config,
    doctor,
    keys,
    models,
    pull,
    record,
    runtimes,
    serve,
    service,
    watch,
)
from supervisor.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from supervisor.errors import ConfigError, LlmuxError

COMMAND_MODULES = (serve, models, watch, chat, doctor, completion, config, keys, runtimes, pull, record, bench, service)


class _Group(click.Group):
    """Renders our errors: the message alone, no traceback. Lists commands in the order of their declaration."""

    def invoke(self, ctx: click.Context) -> object:
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        output.leave_rich_out()
        try:
            return super().invoke(ctx)
        except LlmuxError as error:
            head, lines = f"llmux: {error.message}", error.detail
            if isinstance(error, ConfigError):
                head, lines = "The configuration has mistakes:", error.problems
            click.echo(output.clean("\n  ".join((head, *lines))), err=True)
            sys.exit(exit_code_of(error))
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(ExitCode.INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning.replace("`", "")) for code, meaning in MEANINGS.items()])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llmux-supervisor", prog_name="llmux")
def main() -> None:
    """Run many AI models on too little memory, one worker process each, behind one OpenAI-compatible API."""


for module in COMMAND_MODULES:
    for command in module.COMMANDS:
        main.add_command(command)

if __name__ == "__main__":
    main()
