"""`llmux runtimes`: the environments of the runtimes that have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtimes.registry import REGISTRY
from supervisor.catalog import find_config, load
from supervisor.catalog.sections import runtimes_dir as default_dir
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.io import venvs

Echo = Callable[[str], None]


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


def remove(name: str, runtimes_dir: Path, echo: Echo) -> None:
    """Remove it."""
    lock_of(name)
    echo(f"{name}: removed" if venvs.remove(name, runtimes_dir) else f"{name}: was not installed")


def listing(runtimes_dir: Path) -> list[dict[str, str | int | None]]:
    """A row for each runtime."""
    rows: list[dict[str, str | int | None]] = []
    for name in REGISTRY.names():
        lock = REGISTRY.get(name).requirements
        environment = venvs.installed(name, runtimes_dir) if lock is not None else None
        if lock is None:
            state = "needs no environment"
        elif environment is None:
            state = f"not installed: llmux runtimes install {name}"
        elif environment.lock_digest != venvs.digest(lock):
            state = f"outdated: llmux runtimes install {name}"
        else:
            state = f"installed, {environment.size_bytes() >> 20} MiB"
        rows.append({"name": name, "state": state, "path": str(environment.path) if environment is not None else None})
    return rows
