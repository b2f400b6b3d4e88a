"""`llmux config` and `llmux reload`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from supervisor.cli import operations, output, starter
from supervisor.cli.client import Client
from supervisor.cli.exit_codes import ExitCode, UnreachableError, exit_code_of
from supervisor.cli.options import Flags, config_path, counted, daemon_options, json_option, print_json, server_options
from supervisor.cli.starter import EXAMPLES, SCHEMA, STARTER
from supervisor.errors import ConfigError, InvalidRequestError
from supervisor.host.store import files, local_access

if TYPE_CHECKING:
    from supervisor.schema.daemon import Difference

_EVERY_KEY: Final = ("llmux.example.yaml", SCHEMA)


@click.group()
def config() -> None:
    """Make, check, show and import configurations, and print examples."""


@config.command("init")
@config_path
@json_option
def config_init(config: Path | None, as_json: bool) -> None:
    """Write a first configuration, with comments, where `serve` looks for it, or to PATH. Never overwrites a file."""
    from supervisor.catalog.loading.folders import config_dir  # noqa: PLC0415
    from supervisor.catalog.loading.loader import FILE_NAME  # noqa: PLC0415  # not for declaring

    paths = starter.write((config or config_dir() / FILE_NAME).absolute(), STARTER)
    if as_json:
        print_json({"written": [str(path) for path in paths]})
    else:
        click.echo("\n".join(f"wrote {path}" for path in paths))
        click.echo("Next: edit it, or add a model of the hub with llmux add ORG/REPO-GGUF; then llmux serve.", err=True)


@config.command("check")
@config_path
@json_option
def config_check(config: Path | None, as_json: bool) -> None:
    """Report every mistake of the configuration that `serve` would use, and what its models take on this machine.

    Also report models that can't run on this machine now, for example because a file is missing; then exit with 1. `serve` would
    serve the others.
    """
    from supervisor.cli import configuration  # noqa: PLC0415  # not for declaring
    from supervisor.cli.serving import sizes  # noqa: PLC0415  # not for declaring

    try:
        catalog = configuration.checked(config)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"ok": False, "problems": list(error.problems), "troubles": []})
        sys.exit(exit_code_of(error))
    models, names = list(catalog.models), [entry.name for entry in catalog.listing()]
    here = sizes.on_this_machine(catalog)
    warnings = [*here.problems, *here.warnings, *catalog.unread]
    if as_json:
        print_json(
            {
                "ok": not here.troubles,
                "problems": [],
                "troubles": list(here.troubles),
                "warnings": warnings,
                "sizes": here.sizes,
                "default_models": list(catalog.policy.default_models),
                "models": models,
                "public_names": names,
                "tasks": list(catalog.tasks),
            }
        )
        sys.exit(ExitCode.FAILED if here.troubles else ExitCode.DONE)
    tasks = f", {counted(len(catalog.tasks), 'task')}" if catalog.tasks else ""
    click.echo(f"No mistakes: {counted(len(models), 'model')}, {counted(len(names), 'public name')}{tasks}.")
    for model, size in here.sizes.items():
        click.echo(f"{model}: {size}.")
    if default_models := catalog.policy.default_models:
        after = output.duration(catalog.limits.default_after_s)
        click.echo(f"Back after {after} in which nothing else is asked for: {', '.join(default_models)}.")
    for warning in warnings:
        click.echo(f"warning: {warning}")
    if here.troubles:
        click.echo("What is missing on this machine; all other models are served:")
        click.echo("\n".join(here.troubles))
        sys.exit(ExitCode.FAILED)


@config.command("show")
@config_path
@server_options
@json_option
def config_show(config: Path | None, flags: Flags, as_json: bool) -> None:
    """Show the effective settings and who set each: file, variable, option of serve, or default. Secrets are masked."""
    from supervisor.cli import configuration  # noqa: PLC0415  # not for declaring

    values = configuration.effective(configuration.required(config, flags).read(check_files=False))
    if as_json:
        print_json(configuration.as_json(values))
    else:
        click.echo(configuration.shown(values), nl=False)


@config.command("schema")
@json_option
def config_schema(as_json: bool) -> None:  # noqa: ARG001  # there is nothing else to print
    """Print the JSON Schema of the configuration, for editors; always as JSON."""
    from supervisor.catalog.schema import json_schema  # noqa: PLC0415  # imports every runtime

    print_json(json_schema())


@config.command("example")
@click.argument("name", type=click.Choice(["home-16gb"]), required=False)
@click.option(
    "--to",
    "folder",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Write it there, with its other files. Never overwrites a file.",
)
@json_option
def config_example(name: str | None, folder: Path | None, as_json: bool) -> None:
    """Print the configuration that explains every key, or the complete example NAME (home-16gb)."""
    texts = _example_files(name)
    if folder is not None:
        paths = _write_files(texts, folder)
        if as_json:
            print_json({"name": name, "written": [str(path) for path in paths]})
        else:
            click.echo("\n".join(f"wrote {path}" for path in paths))
    elif as_json:
        print_json({"name": name, "files": texts})
    else:
        first, *further = texts
        click.echo(texts[first], nl=False)
        click.echo(f"Its other files ({', '.join(further)}) come with --to FOLDER.", err=True)


def _example_files(name: str | None) -> dict[str, str]:
    """The texts of an example's files by relative path, the configuration first. None: the example with every key."""
    if name is None:
        return {file: (EXAMPLES / file).read_text(encoding="utf-8") for file in _EVERY_KEY}
    folder = EXAMPLES / "examples" / name
    # Leave out the example's page: it links to others of the source folder, which may be missing here.
    found = (path for path in folder.rglob("*") if path.is_file() and (path.parent, path.suffix) != (folder, ".md"))
    paths = sorted(found, key=lambda path: (path.name != "llmux.yaml", path))
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}


def _write_files(texts: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Write the files, readable for this user alone, since users add keys to them.

    Raises InvalidRequestError where a file exists already, before it writes any, or where a file can't be written.
    """
    paths = {folder / name: text for name, text in texts.items()}
    if there := [str(path) for path in paths if os.path.lexists(path)]:
        raise InvalidRequestError(f"{', '.join(there)}: there already. Name another folder with --to, or move it away.")
    try:
        for path, text in paths.items():
            files.create(path, text)
    except OSError as error:
        raise InvalidRequestError(f"{error.filename}: {error.strerror}. Name another folder with --to.") from error
    return tuple(paths)


@config.command("import")
@click.argument("files", metavar="[FILE]...", type=click.Path(path_type=Path), nargs=-1)
@click.option(
    "--from",
    "form",
    type=click.Choice(["llama-swap", "llama.cpp", "llm-pool", "model-boss", "first-llmux"]),
    help="The program it belongs to. Default: llama.cpp for .ini, llm-pool for .json, first-llmux for physical_models, model-boss for a manifest, else llama-swap.",
)
@click.option("--out", "-o", type=click.Path(path_type=Path), help="File to write. Default, or -: standard output.")
@json_option
def config_import(files: tuple[Path, ...], form: str | None, out: Path | None, as_json: bool) -> None:
    """Turn a configuration of llama-swap, llama.cpp, llm-pool, model-boss (manifest.yaml, tasks.yaml) or the first llmux
    (models.yaml, api_keys.yaml) into one of llmux, and report what could not be imported.
    """
    from supervisor.cli import importers  # noqa: PLC0415  # not for declaring

    out = None if out == Path("-") else out
    draft, text = importers.run(files, form, out)
    if as_json:
        print_json(importers.as_json(draft, text, out))
        return
    if out is None:
        click.echo(text, nl=False)
    click.echo(importers.report(draft, out), err=True)


@click.command("reload")
@click.option(
    "--dry-run", is_flag=True, help="Only show what would happen. Exits with 1 where running requests may be cut."
)
@click.option("--force", is_flag=True, help="Also where the files have no models or no keys any more.")
@click.option("--pid", type=int, help="The daemon with this process id, whatever its address: for the systemd unit.")
@daemon_options
def reload_(dry_run: bool, force: bool, pid: int | None, daemon: Client, as_json: bool) -> None:
    """Apply changes of the configuration without disturbing the rest. If it has mistakes, nothing else changes.

    Keys that were revoked stop working all the same.
    """
    if pid is not None:
        access = local_access.of_process(pid)
        if access is None:
            raise UnreachableError(f"There is no daemon of yours with the process id {pid}.")
        daemon = Client(access.url, access.key)
    try:
        difference = daemon.call(operations.RELOAD_CONFIGURATION, {"dry_run": dry_run, "force": force})
    except InvalidRequestError as error:
        if error.detail:
            raise ConfigError(error.detail) from error
        raise
    if as_json:
        print_json(difference)
    else:
        _show_difference(difference)
    if dry_run and any(stop.in_flight for stop in difference.stops):
        sys.exit(ExitCode.FAILED)


def _show_difference(difference: Difference) -> None:
    for part in ("added", "removed", "changed", "restarted", "settings", "needs_restart"):
        if names := getattr(difference, part):
            click.echo(f"{part.replace('_', ' ') + ':':15}{output.clean(', '.join(names))}")
    for stop in difference.stops:
        words = f"{stop.state}, pinned" if stop.pinned else stop.state
        running = counted(stop.in_flight, "running request")
        ends = f"; {running}, cut after {output.duration(stop.drain_s)}" if stop.in_flight else ""
        click.echo(f"{'stops:':15}{output.clean(stop.model)} ({output.clean(words)}){ends}")
    click.echo(f"{'unchanged:':15}{difference.unchanged}")
    for warning in difference.warnings:
        click.echo(f"warning: {output.clean(warning)}")
