"""`llmux runtimes`: the environments of the runtimes that have one."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from runtimes.registry import REGISTRY
from supervisor.catalog import find_config, load
from supervisor.catalog.sections import runtimes_dir as default_dir
from supervisor.cli import show
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.io import venvs

Echo = Callable[[str], None]
Row = dict[str, str | int | bool | list[str] | None]

IMPORT_S: Final = 120.0


def resolve(explicit: Path | None) -> Path:
    """Where environments are kept: as asked, as configured, or the default. A configuration with mistakes doesn't count."""
    if explicit is not None:
        return explicit
    try:
        return load(check_files=False).server.runtimes_dir if find_config() is not None else default_dir()
    except LlmuxError:
        return default_dir()


def lock_of(name: str) -> Path:
    """The runtime's lock. Raises NotFoundError for no such runtime, or one that needs no environment."""
    if name not in REGISTRY.names():
        raise NotFoundError(f"There is no runtime {name!r}; there are: {', '.join(REGISTRY.names())}.")
    lock = REGISTRY.get(name).requirements
    if lock is None:
        raise NotFoundError(f"The runtime {name!r} needs no environment of its own.")
    return lock


def install(name: str, runtimes_dir: Path, echo: Echo) -> None:
    """Install it, telling each step. Nothing happens when it is there already."""
    venvs.install(name, lock_of(name), runtimes_dir, echo)


def install_watched(name: str, runtimes_dir: Path, echo: Echo) -> None:
    """Install it: on a terminal with a bar of the packages that are there, and the last step; else as `install`."""
    lines: list[str] = []
    wanted = sum("==" in line for line in lock_of(name).read_text(encoding="utf-8").splitlines())
    began = time.monotonic()

    def frame() -> str:
        there = min(wanted, _packages_there(name, runtimes_dir))
        elapsed = show.duration(time.monotonic() - began)
        return (
            f"{name}  {show.bar(there / wanted)}  {there} of {wanted} packages  {elapsed}  {lines[-1] if lines else ''}"
        )

    if not sys.stderr.isatty():
        install(name, runtimes_dir, echo)
        return
    with show.Progress(frame):
        install(name, runtimes_dir, lines.append)
    echo(lines[-1])


def remove(name: str, runtimes_dir: Path) -> bool:
    """Remove it; False when it wasn't there."""
    lock_of(name)
    return venvs.remove(name, runtimes_dir)


def listing(runtimes_dir: Path) -> list[Row]:
    """A row for each runtime. Takes as long as the slowest needs to be imported."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda name: row(name, runtimes_dir), REGISTRY.names()))


def row(name: str, runtimes_dir: Path) -> Row:
    """What is installed of a runtime, and whether its environment can import what its worker imports."""
    found = REGISTRY.get(name)
    lock = found.requirements
    environment = venvs.installed(name, runtimes_dir) if lock is not None else None
    facts: Row = {"name": name, "summary": found.summary, "path": None, "remedy": None}
    if lock is None:
        return facts | {"state": "not needed"}
    if environment is None:
        return facts | {"state": "not installed", "remedy": f"llmux runtimes install {name}"}
    problem = _import_problem(environment.interpreter, lock.with_name("launcher.py"))
    outdated = environment.lock_digest != venvs.digest(lock)
    remedy = f"llmux runtimes install {name}" if outdated else None
    if problem is not None and not outdated:
        remedy = f"llmux runtimes remove {name} && llmux runtimes install {name}"
    return facts | {
        "state": "outdated" if outdated else "broken" if problem is not None else "installed",
        "path": str(environment.path),
        "python": environment.python,
        "packages": list(environment.packages),
        "size_mib": environment.size_bytes() >> 20,
        "imports": problem is None,
        "problem": problem,
        "remedy": remedy,
    }


def table_of(rows: Sequence[Row]) -> str:
    """For people: a line each, and what to do below."""
    lines: list[Sequence[str]] = [("RUNTIME", "STATE", "SIZE", "PYTHON", "IMPORTS", "VERSIONS")]
    for found in rows:
        packages = found.get("packages")
        imports = found.get("imports")
        lines.append(
            (
                str(found["name"]),
                show.state(str(found["state"])),
                show.mib(found.get("size_mib")),
                show.text(found.get("python")),
                "-" if imports is None else "yes" if imports else "no",
                ", ".join(packages) if isinstance(packages, list) else "-",
            )
        )
    told = [f"{found['name']}: {found['problem']}" for found in rows if found.get("problem")]
    told += [f"{found['name']}: {found['remedy']}" for found in rows if found["remedy"]]
    return "\n".join([show.table(lines, width=show.terminal_width()), *told])


def _packages_there(name: str, runtimes_dir: Path) -> int:
    builds = runtimes_dir / venvs.STORE / name
    counts = [sum(1 for _ in folder.glob("*.dist-info")) for folder in builds.glob("*/lib/python*/site-packages")]
    return max(counts, default=0)


def _import_problem(python: Path, launcher: Path) -> str | None:
    """What keeps this interpreter from importing what a worker imports; None: nothing does."""
    modules = sorted(_imports(launcher)) if launcher.exists() else []
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
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _imports(source: Path) -> set[str]:
    """Modules that are neither of the standard library nor ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] not in {*sys.stdlib_module_names, "runtimes"}}
