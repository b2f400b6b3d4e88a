"""The runtimes' own environments: each a venv built from a hash-pinned lock, replaced as a whole or not at all.

A venv can't be moved, its scripts and `pyvenv.cfg` hold absolute paths. So each is built where it will stay,

    <runtimes_dir>/.envs/<name>/<lock digest>-<random>/     complete once it holds `llmux.json`
    <runtimes_dir>/<name>  ->  .envs/<name>/…               what adapters use

and goes live by renaming a new symbolic link over the old one. Whatever interrupts an install, the link still points at
the environment that worked before; what an interrupted one left behind is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import LlmuxError

STORE: Final = ".envs"
RECORD: Final = "llmux.json"  # written last: an environment without it isn't complete
LAST_LINES: Final = 20

Progress = Callable[[str], None]


class InstallError(LlmuxError):
    """An environment couldn't be built; `detail` holds the installer's last lines."""

    code = "runtime_install_failed"


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment. `lock_digest` tells whether it still is what the lock says."""

    name: str
    path: Path
    python: str  # its version, such as 3.11.7
    lock_digest: str
    packages: tuple[str, ...]  # name==version, of everything that is in the lock

    @property
    def interpreter(self) -> Path:
        """The environment's Python."""
        return self.path / "bin" / "python"

    def size_bytes(self) -> int:
        """What it takes on disk. Walks the tree: tens of milliseconds for a large one."""
        return sum(Path(folder, file).lstat().st_size for folder, _, files in os.walk(self.path) for file in files)


def digest(lock: Path) -> str:
    """Identifies the content of a lock together with the Python it is installed for."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return hashlib.sha256(version.encode() + b"\0" + lock.read_bytes()).hexdigest()[:16]


def installed(name: str, runtimes_dir: Path) -> Environment | None:
    """The live environment of a runtime; None when there is none, or none that works."""
    try:
        path = (runtimes_dir / name).resolve(strict=True)
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        environment = Environment(
            name=name,
            path=path,
            python=record["python"],
            lock_digest=record["lock_digest"],
            packages=tuple(record["packages"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return environment if environment.interpreter.exists() else None


def install(name: str, lock: Path, runtimes_dir: Path, progress: Progress) -> Environment:
    """Make the runtime's environment what its lock says, and return it; nothing happens when it already is.

    Blocks for seconds to minutes; `progress` gets lines for a person to watch. Uses uv when it is there, else venv and
    pip; either inherits the environment, so index and mirror settings work. Two at a time take turns.
    Raises InstallError, or OSError when the folder can't be written; the environment from before stays live.
    """
    runtimes_dir = runtimes_dir.absolute()
    wanted = digest(lock)
    builds = runtimes_dir / STORE / name
    builds.mkdir(parents=True, exist_ok=True)
    with _turn(builds, progress):
        current = installed(name, runtimes_dir)
        if current is not None and current.lock_digest == wanted:
            progress(f"{name}: already installed in {current.path}")
            return current
        _sweep(name, runtimes_dir)
        path = builds / f"{wanted}-{secrets.token_hex(4)}"
        try:
            _build(path, lock, progress)
            _record(path, lock, wanted)
            _point(runtimes_dir / name, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        _sweep(name, runtimes_dir)
        environment = installed(name, runtimes_dir)
        assert environment is not None
        progress(f"{name}: installed in {runtimes_dir / name} ({environment.size_bytes() >> 20} MiB)")
        return environment


def remove(name: str, runtimes_dir: Path) -> bool:
    """Remove a runtime's environment; False when there was none. A worker that still runs keeps its open files."""
    builds = runtimes_dir / STORE / name
    if not builds.is_dir():
        return False
    with _turn(builds, lambda _line: None):
        link = runtimes_dir / name
        existed = link.is_symlink()
        link.unlink(missing_ok=True)
        _sweep(name, runtimes_dir)
        return existed


@contextmanager
def _turn(builds: Path, progress: Progress) -> Iterator[None]:
    """One installer of a runtime at a time; the kernel frees the lock of one that dies."""
    with (builds / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another installation to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path, lock: Path, progress: Progress) -> None:
    uv = _uv()
    progress(f"creating {path}")
    if uv is not None:
        _run([*uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(path)], progress)
        python = str(path / "bin" / "python")
        install = [*uv, "pip", "install", "--python", python, "--require-hashes", "--compile-bytecode"]
        _run([*install, "--requirements", str(lock)], progress)
    else:
        _run([sys.executable, "-m", "venv", str(path)], progress)
        python = str(path / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--require-hashes", "--disable-pip-version-check", "--compile"]
        _run([*pip, "--requirement", str(lock)], progress)


def _uv() -> list[str] | None:
    """The uv from PATH, or the one installed beside this interpreter."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")
    return [found] if found else None


def _run(argv: list[str], progress: Progress) -> None:
    lines: list[str] = []
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if text := line.rstrip():
                    lines.append(text)
                    progress(text)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise InstallError(
            f"{Path(argv[0]).name} ended with exit code {process.returncode}: {lines[-1] if lines else 'no output'}",
            detail=tuple(lines[-LAST_LINES:]),
        )


def _record(path: Path, lock: Path, wanted: str) -> None:
    packages = [line.split()[0] for line in lock.read_text(encoding="utf-8").splitlines() if _names_package(line)]
    version = ".".join(str(part) for part in sys.version_info[:3])
    text = json.dumps({"lock_digest": wanted, "python": version, "packages": packages})
    with (path / RECORD).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _names_package(line: str) -> bool:
    return "==" in line and not line.startswith((" ", "#"))


def _point(link: Path, target: Path) -> None:
    """Rename a new link over the old one: whoever looks sees one or the other."""
    if link.is_dir() and not link.is_symlink():
        raise InstallError(f"{link} is a folder that llmux did not make; move it away")
    aside = target.with_name(f"{target.name}.link")
    aside.symlink_to(target.relative_to(link.parent))
    aside.replace(link)


def _sweep(name: str, runtimes_dir: Path) -> None:
    """Remove every build of this runtime that isn't the live one. Only with the turn held."""
    live = (runtimes_dir / name).resolve()
    for path in (runtimes_dir / STORE / name).iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir() and path != live:
            shutil.rmtree(path, ignore_errors=True)
