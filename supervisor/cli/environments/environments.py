"""`llmux runtimes`: the environments of the runtimes that have one."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtimes import licences
from runtimes.registry import REGISTRY
from supervisor.catalog.loading.folders import runtimes_dir as default_dir
from supervisor.cli import configuration, output
from supervisor.cli.environments import worker_imports
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError
from supervisor.host.environments import env_lease, venvs
from supervisor.host.environments.installer import InstallError, Package
from supervisor.host.environments.recipe import Device, Recipe, pinned
from supervisor.host.memory.machine import look

if TYPE_CHECKING:
    from supervisor.cli.environments.packages import Wanted

Echo = Callable[[str], None]
Row = dict[str, str | int | bool | list[str] | dict[str, str] | None]

IMPORT_S: Final = 120.0
_RESOLVED: Final = re.compile(r"Resolved (\d+) package")  # in uv's output; a lock also has packages for other machines


def resolve(explicit: Path | None) -> Path:
    """The folder of environments: the explicit one, else the configured one; where the file can't be read, the one from
    variables, else the default.
    """
    if explicit is not None:
        return explicit
    for read in (configuration.settings, configuration.variables):
        try:
            return read().server().runtimes_dir
        except LlmuxError:
            continue
    return default_dir()


def installable() -> list[str]:
    return [name for name in REGISTRY.names() if REGISTRY.get(name).requirements is not None]


def recipe_of(name: str) -> Recipe:
    """The recipe of a runtime's environment. Raises NotFoundError for an unknown runtime, or one without an environment."""
    if name not in REGISTRY.names():
        raise NotFoundError(f"There is no runtime {name!r}; there are: {', '.join(REGISTRY.names())}.")
    adapter = REGISTRY.get(name)
    if adapter.requirements is None:
        raise NotFoundError(f"The runtime {name!r} needs no environment of its own.")
    return Recipe(name, adapter.requirements, adapter.prune, adapter.claims, adapter.builds, adapter.archives)


def still_used(name: str, runtimes_dir: Path) -> str | None:
    """A sentence about workers that still run from a replaced or removed environment; None: there are none."""
    kept = venvs.still_used(name, runtimes_dir)
    if not kept:
        return None
    models = sorted({model for environment in kept for model in env_lease.models(environment)})
    subject = f"workers of {', '.join(models)} still run" if models else "somebody still runs"
    anew = " && ".join(f"llmux unload {model}" for model in models)
    remedy = f"; to end that: {anew}" if models else ""
    return f"{name}: {subject} from an earlier environment, which stays until they have ended{remedy}"


def install(
    name: str,
    runtimes_dir: Path,
    echo: Echo,
    *,
    device: Device | None = None,
    python: str | None = None,
    wanted: Wanted | None = None,
    plain: bool = False,
) -> None:
    """Install a runtime, unless it is installed. `echo` gets each step; on a terminal a bar shows them and `echo` gets the last.

    Where the runtime's project has builds for GPUs, and `device` is None, take the best build that computes on this machine's
    GPU; where none does, take the processor's and say so. `plain`: take no such build for a first installation.
    """
    recipe = recipe_of(name)
    from supervisor.cli.environments import packages, proof  # noqa: PLC0415  # slow to import

    wanted = wanted or packages.Wanted()
    is_special = wanted.is_special
    if is_special and (recipe.archives is None or device is not None):
        raise InvalidRequestError(
            f"{name} has no builds to choose from."
            if recipe.archives is None
            else "Name a build or --accelerator, not both."
        )
    current = venvs.installed(name, runtimes_dir)
    is_own = current is not None and current.kind is None and (current.is_chosen or current.device in recipe.builds)
    if recipe.archives is None or device is not None or (plain and current is None) or (is_own and not is_special):
        _install(recipe, runtimes_dir, echo, device, python, is_chosen=device is not None)
        return
    machine = look()
    build = current.build if current is not None else None
    problems = []
    for package in packages.candidates(recipe, runtimes_dir, machine, wanted, build, echo):
        try:
            _install(recipe, runtimes_dir, echo, recipe.archives.device(package.kind), python, package)  # type: ignore[arg-type]
        except proof.NoRoomError:  # another build would have no room either
            raise
        except InstallError as error:
            problems.append(f"{package.kind} of {package.build}: {error}")
            echo(problems[-1])
        else:
            packages.forget_download(recipe, package, runtimes_dir, machine)
            return
    if is_special:
        raise InstallError("No build was installed; what was used before is still used.", detail=tuple(problems))
    if machine.gpus:
        echo(
            f"{name}: no build computes on the GPU ({', '.join(gpu.name for gpu in machine.gpus)}): models run on the processor"
        )
    _install(recipe, runtimes_dir, echo, current.device if current is not None else "cpu", python)


def _install(
    recipe: Recipe,
    runtimes_dir: Path,
    echo: Echo,
    device: Device | None,
    python: str | None,
    package: Package | None = None,
    *,
    is_chosen: bool = False,
) -> None:
    from supervisor.cli.environments import proof  # noqa: PLC0415  # slow to import

    name, lines = recipe.name, list[str]()
    if (
        notice := licences.notice(name, recipe.lock.parent, built=package is None and device in recipe.builds)
    ) is not None:
        echo(notice)
    if device is not None and not recipe.varies:
        echo(f"{name}: is the same for every device")
    locked = len({package for lock in recipe.locks(device) for package in pinned(lock)})
    began = time.monotonic()

    def frame() -> output.Row:
        resolved = next(
            filter(None, map(_RESOLVED.match, lines)), None
        )  # the first count is of the locks; torch's may follow
        wanted = int(resolved[1]) if resolved is not None else locked
        there = min(wanted, _count_packages(name, runtimes_dir))
        elapsed = output.duration(time.monotonic() - began)
        return (name, output.Bar(there / wanted), f"{there} of {wanted} packages", elapsed, lines[-1] if lines else "")

    watched = sys.stderr.isatty()
    with output.progress(frame):
        print_line = lines.append if watched else echo
        venvs.install(
            recipe,
            runtimes_dir,
            print_line,
            device=device,
            python=python,
            package=package,
            prove=lambda environment: (
                asdict(proof.prove(environment, print_line)) if package is not None else {"is_asked": is_chosen}
            ),
        )
    if watched:
        echo(lines[-1])


def remove(name: str, runtimes_dir: Path, echo: Echo, build: str | None = None) -> bool:
    """Remove a runtime's environment, or one build; False when there was none. `echo` gets a line when removal has to wait."""
    recipe_of(name)
    return venvs.remove(name, runtimes_dir, echo, build)


def update(name: str, runtimes_dir: Path, echo: Echo, wanted: Wanted) -> None:
    """Use the wanted build, else the one that this llmux pins; the former build stays beside it."""
    from supervisor.cli.environments import packages  # noqa: PLC0415  # httpx comes with it

    recipe = recipe_of(name)
    if recipe.archives is None:
        raise InvalidRequestError(f"{name} has no builds to choose from: llmux runtimes install {name}")
    current, pinned_build = venvs.installed(name, runtimes_dir), packages.releases(recipe, runtimes_dir).pinned
    used = current.build if current is not None else None
    if wanted.build is None and used is not None and int(used[1:]) > int(pinned_build[1:]):
        echo(f"{name}: {used} is used, and this llmux knows none newer; for another one: --build bN")
        return
    install(name, runtimes_dir, echo, wanted=replace(wanted, build=wanted.build or pinned_build))


def listing(runtimes_dir: Path, *, check: bool = False) -> list[Row]:
    """A row for each runtime. `check`: also try the imports, which takes as long as the slowest; else no process is started."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda name: row(name, runtimes_dir, check=check), REGISTRY.names()))


def row(name: str, runtimes_dir: Path, *, check: bool = True) -> Row:
    """The installed environment of a runtime; with `check` also whether the worker's packages can be imported."""
    found = REGISTRY.get(name)
    facts: Row = {"name": name, "summary": found.summary, "path": None, "remedy": None, "earlier": None}
    if found.requirements is None:
        return facts | {"state": "not needed"}
    recipe = recipe_of(name)
    facts["copyleft"] = licences.copyleft(recipe.lock.parent)
    facts["earlier"] = still_used(name, runtimes_dir)
    environment = venvs.installed(name, runtimes_dir)
    if environment is None:
        return facts | {"state": "not installed", "remedy": f"llmux runtimes install {name}"}
    problem = _import_problem(environment.interpreter, recipe.lock.parent) if check else None
    outdated = environment.lock_digest != recipe.digest()
    remedy = f"llmux runtimes install {name}" if outdated else None
    if problem is not None and not outdated:
        remedy = f"llmux runtimes remove {name} && llmux runtimes install {name}"
    return facts | {
        "state": "outdated" if outdated else "broken" if problem is not None else "installed",
        "path": str(environment.path),
        "python": environment.python,
        "device": environment.device,
        "build": environment.build,
        "kind": environment.kind,
        "builds": [link.name.partition("@")[2] for link in venvs.build_links(name, runtimes_dir)],
        "versions": versions(recipe, environment),
        "packages": list(environment.packages),
        "size_mib": environment.size_bytes() >> 20,
        "imports": problem is None if check else None,
        "problem": problem,
        "remedy": remedy,
    }


def versions(recipe: Recipe, environment: venvs.Environment) -> list[str]:
    """The installed versions of the packages that the runtime's own requirements name, without further dependencies."""
    pinned_names: set[str] = set()
    for source in recipe.lock.parent.glob("requirements*.in"):
        pinned_names |= {_normalised_name(package) for package in pinned(source)}
    return [package for package in environment.packages if _normalised_name(package.partition("==")[0]) in pinned_names]


def table_of(rows: Sequence[Row]) -> list[output.Table | str]:
    """The table for people: a line for each runtime, and remedies below."""
    checked = any(found.get("imports") is not None for found in rows)
    head = ("RUNTIME", "STATE", "SIZE", "PYTHON", "DEVICE")
    lines: list[output.Row] = [(*head, *(["IMPORTS"] if checked else []), "VERSIONS")]
    for found in rows:
        listed_versions = found.get("versions")
        imports = found.get("imports")
        lines.append(
            (
                str(found["name"]),
                output.state(str(found["state"])),
                output.mib(found.get("size_mib")),
                output.text(found.get("python")),
                output.text(found.get("kind") or found.get("device")),
                *(["-" if imports is None else "yes" if imports else "no"] if checked else []),
                ", ".join([*_build_names(found), *(listed_versions if isinstance(listed_versions, list) else ())])
                or "-",
            )
        )
    notes = [f"{found['name']}: {found['problem']}" for found in rows if found.get("problem")]
    notes += [str(found["earlier"]) for found in rows if found["earlier"]]
    notes += [f"{found['name']}: {found['remedy']}" for found in rows if found["remedy"]]
    return [output.Table(lines), *notes]


def _build_names(found: Row) -> list[str]:
    """The build in use, then the others in parentheses."""
    used, there = found.get("build"), found.get("builds")
    others = [build for build in there if build != used] if isinstance(there, list) else []
    return [*([str(used)] if used else []), *(f"({build})" for build in others)]


def _count_packages(name: str, runtimes_dir: Path) -> int:
    builds = runtimes_dir / env_lease.STORE / name
    counts = [sum(1 for _ in folder.glob("*.dist-info")) for folder in builds.glob("*/lib/python*/site-packages")]
    return max(counts, default=0)


def _normalised_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _import_problem(python: Path, folder: Path) -> str | None:
    """The reason why this interpreter can't import the packages of the runtime's workers; None: all imports work."""
    modules = sorted(worker_imports.imports(folder))
    try:
        lease = env_lease.EnvLease.on(str(python))
    except env_lease.EnvironmentRemovedError:
        return "it is being replaced just now; look again"
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", "".join(f"import {name}\n" for name in modules)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        if lease is not None:
            lease.record.close()
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
