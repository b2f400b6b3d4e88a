"""Filling an environment with packages: uv where it is there, else the environment's own pip.

Locks are installed by hash and without asking what packages depend on, so nothing that isn't in a lock comes in, and
nothing can replace torch by another build. Where torch's build isn't the one of its lock it comes last: everything it
needs is there by then, it brings only what belongs to its build.

Either program inherits the environment, so settings of indexes, mirrors and certificates work. uv doesn't read pip's
settings; folders of wheels that those name are handed to it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from supervisor.errors import LlmuxError
from supervisor.io.recipe import Device, Recipe, local_torch, pinned, torch_backend

LAST_LINES: Final = 20
FOREIGN: Final = (
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "UV_TORCH_BACKEND",
    "UV_SYSTEM_PYTHON",
    "PIP_REQUIRE_VIRTUALENV",
)
PIP_NEEDS: Final = (
    "pip can't choose the build of torch; install uv (pip install uv), or name a folder of wheels (PIP_FIND_LINKS)"
)

Progress = Callable[[str], None]


class InstallError(LlmuxError):
    """An environment couldn't be built; `detail` holds the installer's last lines."""

    code = "runtime_install_failed"


def fill(path: Path, recipe: Recipe, device: Device | None, python: str | None, progress: Progress) -> None:
    """Make a new environment there. Raises InstallError, and leaves what it has made so far."""
    if not any(pinned(lock) for lock in recipe.locks(device)):
        raise InstallError(f"{recipe.name} has no packages for {device}; choose another --device.")
    uv = find_uv()
    links = wheel_folders() if recipe.torch is not None else ()
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    if links:
        environ["UV_FIND_LINKS"] = ",".join(links)
    environ["UV_NO_WRAP"] = "1"  # the last line of a failure is told alone
    progress(f"creating {path}")
    if uv is not None:
        run(
            [*uv, "venv", "--quiet", "--no-project", "--python", python or sys.executable, str(path)], environ, progress
        )
        install = [*uv, "pip", "install", "--python", str(path / "bin" / "python"), "--compile-bytecode"]
    else:
        run([_interpreter(python), "-m", "venv", str(path)], environ, progress)
        pip = [str(path / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "--compile"]
    locks = [word for lock in recipe.locks(device) for word in ("--requirement", str(lock))]
    run([*install, "--require-hashes", "--no-deps", *locks], environ, progress)
    if recipe.torch is not None and device is not None and recipe.torch_lock not in recipe.locks(device):
        build = _torch(recipe.torch, device, links, version_of(path), uv=uv is not None)
        run([*install, *build], environ, progress)
    _finish(path, recipe, device)


def site_packages(path: Path) -> Path:
    """Where the environment's packages are."""
    found = sorted(path.glob("lib/python*/site-packages"))
    if not found:
        raise InstallError(f"{path} has no packages.")
    return found[0]


def version_of(path: Path) -> tuple[int, int]:
    """The environment's Python."""
    major, minor = site_packages(path).parent.name.removeprefix("python").split(".")
    return int(major), int(minor)


def find_uv() -> list[str] | None:
    """The uv from PATH, or the one installed beside this interpreter."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")
    return [found] if found else None


def wheel_folders() -> tuple[str, ...]:
    """Where the settings for uv say that wheels lie, else those for pip, whose files pip itself has to read."""
    if named := os.environ.get("UV_FIND_LINKS"):
        return tuple(link for link in re.split(r"[,\s]+", named) if link)
    if named := os.environ.get("PIP_FIND_LINKS"):
        return tuple(named.split())
    argv = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    found = re.findall(r"^\S+\.find-links=(.*)$", done.stdout, re.MULTILINE)
    return tuple(link for value in found for words in shlex.split(value) for link in words.replace("\\n", " ").split())


def run(argv: Sequence[str], environ: Mapping[str, str], progress: Progress) -> None:
    """Run it to its end, telling each line. Raises InstallError with the last ones."""
    lines: list[str] = []
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


def _torch(version: str, device: Device, links: Sequence[str], python: tuple[int, int], *, uv: bool) -> list[str]:
    """What to install for torch's build of this device."""
    named = torch_backend(device)
    if named is None and (local := local_torch(version, device, links, python)) is not None:
        folders = [word for link in links for word in ("--find-links", link)]
        return [f"torch=={local}", *folders]
    if not uv:
        raise InstallError(f"No wheel of torch {version} for {device} was found: {PIP_NEEDS}.")
    # uv finds out by itself which of AMD's platforms is here.
    return [f"torch=={version}", "--torch-backend", named or ("auto" if device == "rocm" else device)]


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    found = shutil.which(python) or shutil.which(f"python{python}")
    if found is None:
        raise InstallError(f"There is no Python {python!r} here; name a program or a version that is installed.")
    return found


def _finish(path: Path, recipe: Recipe, device: Device | None) -> None:
    packages = site_packages(path)
    for pattern in recipe.prune:
        for file in packages.glob(pattern):
            file.unlink()
    for claim in recipe.claims.get(device or "", ()):
        name, _, version = claim.partition("==")
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
