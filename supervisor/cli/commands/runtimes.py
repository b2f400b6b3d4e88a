"""`llmux runtimes`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from supervisor.cli.options import answer, json_option, print_json
from supervisor.errors import LlmuxError

if TYPE_CHECKING:
    from supervisor.host.environments.recipe import Device


@click.group()
def runtimes() -> None:
    """Install and remove the runtimes' own environments."""


runtimes_dir_option = click.option(
    "--runtimes-dir", type=click.Path(path_type=Path), help="Where environments are kept. Default: as configured."
)


build_option = click.option(
    "--build",
    help="llama_server: a build of llama.cpp's releases, such as b11146. Default: the one in use, else llmux's own.",
)


def _complete_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The runtimes that can have an environment, for the shell's completion; for `remove` only installed ones."""
    from supervisor.cli.environments import environments  # noqa: PLC0415  # not for declaring

    names = [name for name in environments.installable() if name.startswith(incomplete)]
    if ctx.command.name != "remove":
        return names
    try:
        folder = environments.resolve(ctx.params.get("runtimes_dir"))
        return [name for name in names if (folder / name).exists()]
    except (LlmuxError, OSError):
        return []


@runtimes.command("install")
@click.argument("name", shell_complete=_complete_names)
@click.option(
    "--accelerator",
    "--device",
    "device",
    type=click.Choice(["cpu", "cuda", "rocm", "vulkan"]),
    help="The device to compute on; llama_server and llama_cpp are compiled for a GPU. Default: as before, else what this "
    "machine has; llama_server: a ready build for its GPU; llama_cpp: the processor.",
)
@click.option("--python", help="Its Python: a version or a program. Default: as before, else the one that runs llmux.")
@build_option
@click.option(
    "--kind", help="llama_server: this kind of build, such as vulkan, cuda-12.8, rocm-10.0. Default: tried in turn."
)
@click.option(
    "--from",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="llama_server: a release's archive that was carried here; once more for CUDA's libraries.",
)
@click.option("--yes", is_flag=True, help="Take an archive whose sha256 llmux doesn't know.")
@runtimes_dir_option
@json_option
def runtimes_install(
    name: str,
    device: Device | None,
    python: str | None,
    build: str | None,
    kind: str | None,
    files: tuple[Path, ...],
    yes: bool,
    runtimes_dir: Path | None,
    as_json: bool,
) -> None:
    """Build the environment of runtime NAME from its hash-pinned locks.

    llama_server: with a ready build of llama.cpp for this machine's GPU, if it has one that computes there.
    """
    from supervisor.cli.environments import environments, packages  # noqa: PLC0415  # not for declaring

    folder = environments.resolve(runtimes_dir)
    echo = functools.partial(click.echo, err=as_json)
    wanted = packages.Wanted(build, kind, files, _confirmation(yes))
    environments.install(name, folder, echo, device=device, python=python, wanted=wanted)
    if (note := environments.still_used(name, folder)) is not None:
        click.echo(note, err=True)
    if as_json:
        print_json(environments.row(name, folder))


def _confirmation(yes: bool) -> Callable[[str], bool]:
    return _confirm_always if yes else _ask_person


def _confirm_always(_question: str) -> bool:
    return True


def _ask_person(question: str) -> bool:
    return sys.stdin.isatty() and click.confirm(question, err=True)


@runtimes.command("update")
@click.argument("name", shell_complete=_complete_names)
@build_option
@runtimes_dir_option
@json_option
def runtimes_update(name: str, build: str | None, runtimes_dir: Path | None, as_json: bool) -> None:
    """Use another build of runtime NAME's program; only llama_server has builds. The former build stays; --build returns to it."""
    from supervisor.cli.environments import environments, packages  # noqa: PLC0415  # not for declaring

    folder = environments.resolve(runtimes_dir)
    environments.update(name, folder, functools.partial(click.echo, err=as_json), packages.Wanted(build))
    if as_json:
        print_json(environments.row(name, folder))


@runtimes.command("list")
@click.option("--check", is_flag=True, help="Also try whether their packages can be imported, which takes seconds.")
@json_option
@runtimes_dir_option
def runtimes_list(check: bool, runtimes_dir: Path | None, as_json: bool) -> None:
    """Show the runtimes and their environments: size, device, versions."""
    from supervisor.cli.environments import environments  # noqa: PLC0415  # not for declaring

    rows = environments.listing(environments.resolve(runtimes_dir), check=check)
    answer(rows, *environments.table_of(rows), as_json=as_json)


@runtimes.command("remove")
@click.argument("name", shell_complete=_complete_names)
@click.option("--build", help="Only this build, such as b11146.")
@runtimes_dir_option
@json_option
def runtimes_remove(name: str, build: str | None, runtimes_dir: Path | None, as_json: bool) -> None:
    """Remove the environment of runtime NAME."""
    from supervisor.cli.environments import environments  # noqa: PLC0415  # not for declaring

    folder = environments.resolve(runtimes_dir)
    existed = environments.remove(name, folder, functools.partial(click.echo, err=True), build)
    if as_json:
        print_json({"name": name, "removed": existed})
    else:
        click.echo(f"{name}: removed" if existed else f"{name}: was not installed")
    if (note := environments.still_used(name, folder)) is not None:
        click.echo(note, err=True)
