"""The `llmux` command: the group of all commands, which turns errors into a message and an exit code.

The modules of `commands` define the commands: arguments in, a table or `--json` out. Results go to stdout, messages for
people to stderr. These modules import nothing slow at the top, so that `llmux --help`, completion and `llmux ps` are quick;
slow imports are in modules beside that package, which a command imports when it runs.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import click

from supervisor.cli import failures, output
from supervisor.cli.commands.about import completion, man, version
from supervisor.cli.commands.bench import bench
from supervisor.cli.commands.chat import chat
from supervisor.cli.commands.clients import clients
from supervisor.cli.commands.config import config, reload_
from supervisor.cli.commands.doctor import doctor
from supervisor.cli.commands.jobs import jobs
from supervisor.cli.commands.keys import keys
from supervisor.cli.commands.lease import lease
from supervisor.cli.commands.loads import loads
from supervisor.cli.commands.models import load, ps, unload
from supervisor.cli.commands.pull import pull
from supervisor.cli.commands.record import record, replay
from supervisor.cli.commands.run import add, remove, run
from supervisor.cli.commands.runtimes import runtimes
from supervisor.cli.commands.serve import demo, serve
from supervisor.cli.commands.service import service
from supervisor.cli.commands.token import token
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
    lease,
    chat,
    run,
    add,
    remove,
    doctor,
    completion,
    man,
    config,
    reload_,
    keys,
    clients,
    token,
    loads,
    jobs,
    runtimes,
    pull,
    record,
    replay,
    bench,
    service,
    version,
)

ALIASES: Final = {
    **dict.fromkeys(("list", "ls", "status", "models"), "ps"),
    **dict.fromkeys(("rm", "delete"), "remove"),
    "stop": "unload",
    "get": "add",
    "log": "logs",
    "start": "serve",
}
"""Commands of Ollama and LM Studio → the equivalent command here."""

INSTEAD: Final = {
    "show": "llmux ps --wide shows the models, llmux config show every setting",
    "create": "llmux add ORG/REPO-GGUF enters a model; a system prompt and parameters are a virtual model: llmux config example",
    "cp": "another name for a model is a virtual model, virtual_models: {NAME: {model: MODEL}}: llmux config example",
    "push": "nothing is published; llmux pull MODEL fetches one",
    "server": "llmux serve starts the server, llmux ps asks it, and Ctrl-C ends it; llmux service install starts it with the machine",
    "search": "look for it on the model hub, then: llmux add ORG/REPO-GGUF",
    "install": "llmux add ORG/REPO-GGUF adds a model, llmux runtimes install NAME a runtime",
    "restart": "llmux unload MODEL and llmux load MODEL restart a model; llmux reload applies a changed configuration",
    "help": "llmux --help, or llmux COMMAND --help",
}
"""Their commands without an equivalent → what to do in llmux instead."""


def _open_missing_streams() -> None:
    """Open missing standard streams as /dev/null; else a file opened later would get their numbers, and prints would go into it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # gets the lowest free number, which is `descriptor`
            setattr(sys, name, os.fdopen(descriptor, "r+" if descriptor else "r", closefd=False))


class _Group(click.Group):
    """Prints errors as a message without traceback. Lists commands in the order of their declaration."""

    _for_programs = False

    def main(self, args: Sequence[str] | None = None, *words: Any, **extra: Any) -> Any:
        """Like click's `main`; with `--json` a mistake in the command line is printed as JSON, too."""
        _open_missing_streams()
        gc.set_threshold(50_000, 20, 20)  # a command mostly makes modules, which are no garbage
        given = sys.argv[1:] if args is None else list(args)
        self._for_programs = "--json" in itertools.takewhile(lambda word: word != "--", given)
        if not extra.get("standalone_mode", True):
            return super().main(args, *words, **extra)
        try:
            code = super().main(args, *words, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            error.show()
            if self._for_programs:
                failures.print_usage_error_json(error)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("Aborted!", err=True)
            sys.exit(ExitCode.FAILED)
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)

    def invoke(self, ctx: click.Context) -> object:
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        output.leave_rich_out()
        try:
            return super().invoke(ctx)
        except LlmuxError as error:
            self._fail(error)
        except OSError as error:
            refusal = failures.of_system(error)
            if refusal is None:  # also for a closed pipe after the output
                raise
            import logging  # noqa: PLC0415  # most commands log nothing

            logging.getLogger("llmux").debug("system.refused", exc_info=error)
            self._fail(refusal)
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(ExitCode.INTERRUPTED)

    def _fail(self, error: LlmuxError) -> NoReturn:
        head, lines = f"llmux: {error.message}", error.detail
        if isinstance(error, ConfigError):
            head, lines = "The configuration has mistakes:", error.problems
        click.echo(output.clean("\n  ".join((head, *lines))), err=True)
        code = exit_code_of(error)
        if self._for_programs:
            failures.print_error_json(error, code)
        sys.exit(code)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word, *rest = args
        if word in INSTEAD and not ctx.resilient_parsing:
            ctx.fail(f"llmux has no command {word!r}: {INSTEAD[word]}.")
        return super().resolve_command(ctx, [ALIASES.get(word, word), *rest])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning.replace("`", "")) for code, meaning in MEANINGS.items()])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="llmux-supervisor", prog_name="llmux")
def main() -> None:
    """Run many AI models on too little memory, one worker process each, behind one OpenAI-compatible API."""


for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main()
