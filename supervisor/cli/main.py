"""The `llmux` command: the group of all commands, and how an error becomes a message and an exit code.

The modules of `commands` have the commands: arguments in, a table or `--json` out. Results go to stdout, messages for
people to stderr. They import only what loads quickly, for `llmux --help`, completion and `llmux ps`; what loads slowly is
in modules beside that package, which a command imports when it runs.
"""

from __future__ import annotations

import os
import sys

import click

from supervisor.cli import output
from supervisor.cli.commands.bench import bench
from supervisor.cli.commands.chat import chat
from supervisor.cli.commands.completion import completion
from supervisor.cli.commands.config import config, reload_
from supervisor.cli.commands.doctor import doctor
from supervisor.cli.commands.keys import keys
from supervisor.cli.commands.models import load, ps, unload
from supervisor.cli.commands.pull import pull
from supervisor.cli.commands.record import record, replay
from supervisor.cli.commands.run import add, remove, run
from supervisor.cli.commands.runtimes import runtimes
from supervisor.cli.commands.serve import demo, serve
from supervisor.cli.commands.service import service
from supervisor.cli.commands.top import top
from supervisor.cli.commands.watch import events, logs, why
from supervisor.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from supervisor.errors import ConfigError, LlmuxError

COMMANDS = (
    serve,
    demo,
    ps,
    load,
    unload,
    top,
    logs,
    events,
    why,
    chat,
    run,
    add,
    remove,
    doctor,
    completion,
    config,
    reload_,
    keys,
    runtimes,
    pull,
    record,
    replay,
    bench,
    service,
)


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


for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main()
