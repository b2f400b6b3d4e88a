"""Builds of a project's releases: the candidates for this machine, and their archives."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtimes.machine import Machine
from supervisor.errors import InvalidRequestError
from supervisor.host.environments.archives.releases import BUILD, NOTED, Releases
from supervisor.host.environments.installer import InstallError, Package
from supervisor.host.environments.recipe import Recipe
from supervisor.host.hub.download import File

DOWNLOADS: Final = ".downloads"
Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The package that a person named: a build and a kind, if not the usual ones, or local archives.

    `agreed`: asks the person whether to take a file of an unknown digest.
    """

    build: str | None = None
    kind: str | None = None
    files: tuple[Path, ...] = ()
    agreed: Callable[[str], bool] = lambda _question: False

    @property
    def is_special(self) -> bool:
        return bool(self.build or self.kind or self.files)


def releases(recipe: Recipe, runtimes_dir: Path) -> Releases:
    """The releases of this runtime, with the digests recorded beside its environments."""
    assert recipe.archives is not None
    return Releases(recipe.archives.pins, runtimes_dir / f"{recipe.name}.{NOTED}")


def candidates(
    recipe: Recipe, runtimes_dir: Path, machine: Machine, wanted: Wanted, current: str | None, echo: Echo
) -> Iterator[Package]:
    """The packages to install, the best first. `current`: the build in use. Raises LlmuxError for an unsuitable file."""
    archives, known = recipe.archives, releases(recipe, runtimes_dir)
    assert archives is not None
    if wanted.build is not None and BUILD.fullmatch(wanted.build) is None:
        raise InvalidRequestError(f"{wanted.build!r} is no build of llama.cpp; one is called b11146, for example.")
    if wanted.files:
        yield _local_package(recipe, known, wanted, machine)
        return
    build = wanted.build or current or known.pinned
    kinds: Sequence[str] = (wanted.kind,) if wanted.kind is not None else ()
    if not kinds:
        choice = archives.choose(machine)
        kinds = choice.kinds
        for reason in choice.reasons:
            echo(reason)
    for kind in kinds:
        program, libraries = archives.name(build, kind, machine.processor)
        ask = wanted.build is not None or build != known.pinned
        get = functools.partial(known.fetch, build, folder=runtimes_dir / DOWNLOADS, notify=echo, ask=ask)
        yield Package(
            build, kind, functools.partial(get, program), functools.partial(get, libraries) if libraries else None
        )


def forget_download(recipe: Recipe, package: Package, runtimes_dir: Path, machine: Machine) -> None:
    """Delete the archives of an installed package, but of no other build: another process may be downloading one."""
    assert recipe.archives is not None
    for name in recipe.archives.name(package.build, package.kind, machine.processor):
        if name is not None:
            (runtimes_dir / DOWNLOADS / name).unlink(missing_ok=True)


def _local_package(recipe: Recipe, known: Releases, wanted: Wanted, machine: Machine) -> Package:
    """The package of local archives, which must have the names of the release."""
    assert recipe.archives is not None
    program = next((path for path in wanted.files if path.name.startswith("llama-")), wanted.files[0])
    found = re.fullmatch(r"llama-(b[0-9]+)-bin-ubuntu-(.+)-(?:x64|arm64)\.tar\.gz", program.name)
    if found is None:
        raise InvalidRequestError(
            f"{program.name}: its name doesn't say which build it is; keep the release's, as in "
            f"{recipe.archives.name(known.pinned, 'vulkan', machine.processor)[0]}.",
            param="--from",
        )
    build, kind = found[1], found[2]
    names = recipe.archives.name(build, kind, machine.processor)
    if program.name != names[0]:
        raise InvalidRequestError(
            f"{program.name} is for another processor; this one needs {names[0]}.", param="--from"
        )
    by_name = {path.name: path for path in wanted.files}
    for path in wanted.files:
        _check_archive(path, known, wanted)
    libraries = by_name.get(names[1] or "")
    return Package(build, kind, lambda: program, (lambda: libraries) if libraries is not None else None)


def _check_archive(path: Path, known: Releases, wanted: Wanted) -> None:
    """Raises InstallError unless the digest is the release's, or a person has agreed to an unknown one."""
    if not path.is_file():
        raise InvalidRequestError(f"{path}: there is no such file.", param="--from")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    found, expected = File(path.name, path.stat().st_size, digest), known.known(path.name)
    if found == expected:
        return
    if expected is not None:
        raise InstallError(
            f"{path} has the sha256 {digest}, and it must be {expected.digest}: it was damaged or changed."
        )
    if not wanted.agreed(f"{path.name} has the sha256 {digest}, which llmux doesn't know. Install it?"):
        raise InstallError(
            f"{path.name} is not known: compare its sha256, {digest}, with the release's; then add --yes."
        )
    known.note([found])
