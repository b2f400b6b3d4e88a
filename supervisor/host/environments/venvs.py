"""The runtimes' own environments: each a venv built from hash-pinned locks, replaced as a whole or not at all.

A venv can't be moved: its scripts and `pyvenv.cfg` hold absolute paths. So each is built in its final place,

    <runtimes_dir>/.envs/<name>/<digest>-<random>/     complete once it has `llmux.json`
    <runtimes_dir>/<name>  ->  .envs/<name>/…               the link that adapters use

and goes live when a new symbolic link is renamed over the old one. If an install is interrupted, the link still points at
the old environment, and the next install removes the unfinished one.

A build of a project's release also stands beside the others, and stays until it is removed:

    <runtimes_dir>/<name>@<build>  ->  .envs/<name>/…

A replaced environment stays while a worker runs from it (see env_lease); workers are started by its real path, not by the
link. It is removed when its last worker ends, when the daemon starts, or by the next install or remove.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from runtimes.installed import RECORD
from supervisor.host.environments import env_lease, installer
from supervisor.host.environments.env_lease import STORE, EnvLease
from supervisor.host.environments.installer import InstallError, Package, Progress
from supervisor.host.environments.recipe import Device, Recipe
from supervisor.host.memory import devices
from supervisor.host.store import files


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment. It is outdated when `lock_digest` isn't the recipe's."""

    name: str
    path: Path
    python: str  # its version, such as 3.11.7
    requested_python: str | None  # None: the Python of llmux
    device: Device | None  # None where the device makes no difference
    lock_digest: str
    packages: tuple[str, ...]  # name==version
    recorded_bytes: int | None = None  # its size when it was made; an older llmux did not record it
    build: str | None = None  # of its project's release; set together with `kind`
    kind: str | None = None
    is_chosen: bool = False  # a person named the device

    @property
    def interpreter(self) -> Path:
        return self.path / "bin" / "python"

    def is_made_so(self, digest: str, *how: str | None) -> bool:
        """Was the environment made by this recipe, for this device, Python, build and kind?"""
        return (self.lock_digest, self.device, self.requested_python, self.build, self.kind) == (digest, *how)

    def size_bytes(self) -> int:
        """The environment's size on disk, as recorded. Without a record it walks the tree: half a second for a large one."""
        return _size_bytes(self.path) if self.recorded_bytes is None else self.recorded_bytes


def installed(name: str, runtimes_dir: Path) -> Environment | None:
    """A runtime's live environment; None: it has none that works."""
    try:
        path = (runtimes_dir / name).resolve(strict=True)
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        environment = Environment(
            name=name,
            path=path,
            python=record["python"],
            requested_python=record["asked_python"],
            device=record["device"] if record["device"] in get_args(Device) else None,
            lock_digest=record["lock_digest"],
            packages=tuple(record["packages"]),
            recorded_bytes=record.get("size_bytes"),
            build=record.get("build"),
            kind=record.get("kind"),
            is_chosen=record.get("is_asked", False),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return environment if environment.interpreter.exists() else None


def install(
    recipe: Recipe,
    runtimes_dir: Path,
    progress: Progress,
    *,
    device: Device | None = None,
    python: str | None = None,
    package: Package | None = None,
    prove: Callable[[Path], Mapping[str, object]] = lambda _environment: {},
) -> Environment:
    """Make the runtime's environment by its recipe, unless it is up to date, and return it.

    `device` and `python` default to those of the present environment; for a new one, to this machine's device and the Python
    of llmux. Blocks for seconds to minutes; `progress` gets lines for a person. Two installations of one runtime take turns.
    `package`: its program is this archive, and the environment also stands as name@build. The findings of `prove` on a new one
    are recorded; if it raises, the environment is discarded. Raises InstallError, or OSError when the folder can't be written;
    the old environment stays live.
    """
    name = recipe.name
    runtimes_dir = runtimes_dir.absolute()
    wanted = recipe.digest()
    builds = runtimes_dir / STORE / name
    builds.mkdir(parents=True, exist_ok=True)
    with _install_lock(builds, progress):
        current = installed(name, runtimes_dir)
        if not recipe.varies:
            device = None
        elif device is None:
            device = (current.device if current is not None else None) or recipe.usual(devices.detect())
        build, kind = (package.build, package.kind) if package is not None else (None, None)
        if current is not None:
            python = python or current.requested_python
        for there in (current, installed(f"{name}@{build}", runtimes_dir) if build is not None else None):
            if there is not None and there.is_made_so(wanted, device, python, build, kind):
                if there is not current:
                    _point_link(runtimes_dir / name, there.path)
                    progress(f"{name}: build {build} is there already, and is used from now on")
                else:
                    progress(f"{name}: already installed in {there.path}")
                return there
        _remove_unused(name, runtimes_dir)
        path = builds / f"{wanted}-{secrets.token_hex(4)}"
        try:
            installer.fill(path, recipe, device, python, progress, package)
            facts = {} if package is None else {"build": build, "kind": kind, **installer.libraries(path)}
            _write_record(path, wanted, device, python, facts)
            _write_record(path, wanted, device, python, {**facts, **prove(path)})
            if build is not None:
                _point_link(runtimes_dir / f"{name}@{build}", path)
            _point_link(runtimes_dir / name, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        _remove_unused(name, runtimes_dir)
        environment = installed(name, runtimes_dir)
        assert environment is not None
        kind = f" for {device}" if device is not None else ""
        progress(f"{name}: installed in {runtimes_dir / name}{kind} ({environment.size_bytes() >> 20} MiB)")
        return environment


def remove(name: str, runtimes_dir: Path, progress: Progress = lambda _line: None, build: str | None = None) -> bool:
    """Remove a runtime's environments, or one build, each once no worker uses it; False when there was none.

    Waits for an installation that is under way, and reports that.
    """
    builds = runtimes_dir / STORE / name
    if not builds.is_dir():
        return False
    with _install_lock(builds, progress):
        links = [runtimes_dir / name, *build_links(name, runtimes_dir)]
        if build is not None:
            removed = (runtimes_dir / f"{name}@{build}").resolve()
            links = [link for link in links if link.resolve() == removed]
        existed = [link for link in links if link.is_symlink()]
        for link in existed:
            link.unlink()
        _remove_unused(name, runtimes_dir)
        return bool(existed)


def build_links(name: str, runtimes_dir: Path) -> list[Path]:
    """The links to a runtime's builds, such as name@b11146."""
    return sorted(runtimes_dir.glob(f"{glob.escape(name)}@*"))


def still_used(name: str, runtimes_dir: Path) -> tuple[Path, ...]:
    """The runtime's replaced or removed environments that are still in use."""
    return tuple(build for build in _replaced_builds(name, runtimes_dir) if env_lease.in_use(build))


def sweep_in_background(runtimes_dir: Path, name: str | None = None) -> threading.Thread:
    """Remove replaced environments that nobody uses, of one runtime or of all.

    Runs on a thread that nobody has to wait for: after an interruption the next call goes on.
    """

    def sweep() -> None:
        for builds in (runtimes_dir / STORE).glob(name or "*"):
            with suppress(OSError), _install_lock(builds, lambda _line: None):  # the folder may belong to another user
                _remove_unused(builds.name, runtimes_dir)

    thread = threading.Thread(target=sweep, name="sweep environments", daemon=True)
    thread.start()
    return thread


def give_back(lease: EnvLease) -> None:
    """End a worker's lease. The end of the last lease removes a replaced environment in the background."""
    lease.record.close()
    if env_lease.is_replaced(lease.environment):
        sweep_in_background(lease.environment.parents[2], lease.environment.parent.name)


def _install_lock(builds: Path, progress: Progress) -> AbstractContextManager[bool]:
    """The lock that lets one process at a time change a runtime's environments."""
    return files.locked(builds / "lock", lambda: progress("waiting for another installation to finish"))


def _size_bytes(path: Path) -> int:
    return sum(Path(folder, file).lstat().st_size for folder, _, files in os.walk(path) for file in files)


def _write_record(
    path: Path, wanted: str, device: Device | None, requested_python: str | None, facts: Mapping[str, object]
) -> None:
    found = importlib.metadata.distributions(path=[str(installer.site_packages(path))])
    settings = (path / "pyvenv.cfg").read_text(encoding="utf-8")
    version = re.search(r"^version(?:_info)? *= *(\S+)", settings, re.MULTILINE)
    text = json.dumps(
        {
            "lock_digest": wanted,
            "python": version.group(1) if version is not None else "unknown",
            "asked_python": requested_python,
            "device": device,
            "size_bytes": _size_bytes(path),
            "packages": sorted({f"{package.name}=={package.version}" for package in found}),
            **facts,
        }
    )
    with files.replacing(path / RECORD) as record:
        record.write_text(text, encoding="utf-8")


def _point_link(link: Path, target: Path) -> None:
    """Rename a new link over the old one, in one step."""
    if link.is_dir() and not link.is_symlink():
        raise InstallError(f"{link} is a folder that llmux did not make; move it away")
    aside = target.with_name(f"{target.name}.link")
    aside.symlink_to(target.relative_to(link.parent))
    aside.replace(link)


def _remove_unused(name: str, runtimes_dir: Path) -> None:
    """Remove this runtime's unused environments except the live ones. Needs the lock."""
    for path in (runtimes_dir / STORE / name).iterdir():
        if path.is_symlink():
            path.unlink()
    for path in _replaced_builds(name, runtimes_dir):
        with env_lease.retire(path) as ours:
            if ours:
                shutil.rmtree(path, ignore_errors=True)


def _replaced_builds(name: str, runtimes_dir: Path) -> Iterator[Path]:
    builds = runtimes_dir / STORE / name
    live = env_lease.live(builds)
    for path in builds.iterdir() if builds.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and path.resolve() not in live:
            yield path
