"""`llmux pull`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import click

from supervisor.cli import output
from supervisor.cli.commands.run import add
from supervisor.cli.exit_codes import ExitCode
from supervisor.cli.options import complete_public, config_option, json_option, print_json
from supervisor.errors import LlmuxError


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=complete_public)
@click.option("--dry-run", is_flag=True, help="Only show what would be fetched, and its size.")
@click.option("--verify", is_flag=True, help="Hash the files that are there already once more.")
@click.option(
    "--watched",
    is_flag=True,
    help="For programs: print the progress in bytes as JSON lines; stop when standard input ends.",
)
@config_option
@json_option
def pull(
    models: tuple[str, ...], dry_run: bool, verify: bool, watched: bool, config: Path | None, as_json: bool
) -> None:
    """Fetch the files of MODELs from the model hub, or of all models whose configuration names a source.

    A MODEL that isn't configured, such as ORG/REPO-GGUF or llama3.2, is entered as well, as llmux add does.

    Models with FP8 or MXFP4 weights also get the kernels that compute with them, in the builds that fit the runtime's
    environment. Files that are there are not fetched again, and interrupted downloads resume; a file from Xet storage
    starts over. Gated models need a token: HF_TOKEN.
    """
    from supervisor.cli import configuration  # noqa: PLC0415  # not for declaring
    from supervisor.cli.models import pull as pulling  # noqa: PLC0415  # as above

    new = [] if watched or verify else [model for model in dict.fromkeys(models) if _is_new(model, config)]
    if new and len(models) == 1:
        _add_model(new[0], config, dry_run=dry_run, as_json=as_json)
        return
    names = [model for model in models if model not in new]
    failed = False
    if new:
        if dry_run and as_json:
            raise click.UsageError(f"{new[0]} isn't configured: with --dry-run and --json name it alone.")
        if names:  # refuse unknown names before anything is fetched
            pulling.named(configuration.required(config).read(check_files=False), names)
        for model in new:
            try:
                _add_model(model, config, dry_run=dry_run)
            except LlmuxError as error:
                failed = True
                click.echo(output.clean("\n  ".join((f"{model}: {error.message}", *error.detail))), err=True)
            else:
                names += [] if dry_run else [_configured_name(model, config)]
        if not names:
            sys.exit(ExitCode.FAILED if failed else ExitCode.DONE)
    if watched:
        pulling.end_with_stdin()
    wanted = pulling.downloads(configuration.required(config).read(check_files=False), names, verify=verify)
    if not wanted:
        click.echo("No model of the configuration names a source.", err=as_json)
    try:
        if not dry_run:
            pulling.make_room(wanted)
            show_amount = pulling.show_amount if watched else None
            pulling.fetch(wanted, functools.partial(click.echo, err=True), show_amount)
    finally:
        if as_json:
            print_json([download.row() for download in wanted])
        elif wanted and not watched:
            output.show(*pulling.table_of(wanted))
    if failed or any(download.problem for download in wanted):
        sys.exit(ExitCode.FAILED)


def _add_model(model: str, config: Path | None, *, dry_run: bool, as_json: bool = False) -> None:
    """Add a model, as `llmux add` does. Raises LlmuxError."""
    options = (*(("--dry-run",) if dry_run else ()), *(("--json",) if as_json else ()))
    named = ("--config", str(config)) if config is not None else ()
    with add.make_context("add", [model, *options, *named], click.get_current_context()) as adds:
        add.invoke(adds)


def _configured_name(model: str, config: Path | None) -> str:
    """The configured name of a model of the hub."""
    from supervisor.cli.models import hub_models, model_entries  # noqa: PLC0415  # not for declaring

    reference = hub_models.reference(model)
    assert reference is not None
    known = model_entries.configured(model_entries.target(config).catalog, reference)
    assert known is not None
    return known


def _is_new(model: str, config: Path | None) -> bool:
    """Whether this is a model of the hub, and not a name in the configuration."""
    from supervisor.cli.models import hub_models, model_entries  # noqa: PLC0415  # not for declaring

    return model_entries.target(config).catalog.route(model) is None and hub_models.reference(model) is not None
