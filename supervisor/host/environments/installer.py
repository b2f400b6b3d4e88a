"""Filling an environment with packages, by the uv that is installed with llmux.

Locks are installed by hash and without dependencies, so nothing else is installed and nothing replaces torch by another
build. If another build of torch is wanted than that of its lock, it is installed last, with only its own dependencies.

uv inherits the environment variables, so settings of indexes, mirrors and certificates work. uv doesn't read pip's settings,
so the folders of wheels that they name are passed to uv.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uv

from supervisor.errors import LlmuxError
from supervisor.host.environments import compiling
from supervisor.host.environments.archives import ReleaseError
from supervisor.host.environments.archives.elf import needs
from supervisor.host.environments.archives.unpack import unpack
from supervisor.host.environments.recipe import Device, Recipe, local_torch, pinned, torch_backend
from supervisor.host.memory.machine import glibc, loads

LAST_LINES: Final = 20
UNPACKED: Final = "program"
PACKAGES: Final = {
    "libgomp.so.1": "Debian, Ubuntu: apt install libgomp1",
    "libvulkan.so.1": "Debian, Ubuntu: apt install libvulkan1",
    "libcuda.so.1": "it comes with NVIDIA's driver; a container gets it by NVIDIA's toolkit",
    "libssl.so.3": "Debian, Ubuntu: apt install libssl3",
    "libcrypto.so.3": "Debian, Ubuntu: apt install libssl3",
}
"""The packages that provide a library, in words for a person."""
FULL: Final = ("No space left on device", "Disk quota exceeded")
FOREIGN: Final = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "UV_TORCH_BACKEND", "UV_SYSTEM_PYTHON")

Progress = Callable[[str], None]


class InstallError(LlmuxError):
    """An environment couldn't be built; `detail` holds the installer's last lines."""

    code = "runtime_install_failed"


@dataclass(frozen=True, slots=True)
class Package:
    """An archive of a project's release, fetched or carried here, and the archive of the libraries that it needs."""

    build: str
    kind: str
    archive: Callable[[], Path]
    libraries: Callable[[], Path] | None = None


def fill(
    path: Path,
    recipe: Recipe,
    device: Device | None,
    python: str | None,
    progress: Progress,
    package: Package | None = None,
) -> None:
    """Make a new environment in `path`. Raises InstallError, and leaves the files made so far."""
    if device is not None and device not in recipe.devices:
        there = ", ".join(recipe.devices)
        raise InstallError(f"{recipe.name} has no packages for {device}; choose another --accelerator: {there}.")
    build = recipe.builds.get(device or "") if package is None else None
    if build is not None and (lacking := compiling.problem(recipe.name, device, build)) is not None:
        raise InstallError(lacking)
    try:
        program = uv.find_uv_bin()
    except FileNotFoundError as error:
        raise InstallError("The uv that belongs to llmux is not there any more; install llmux again.") from error
    links = wheel_folders()
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    if links:
        environ["UV_FIND_LINKS"] = ",".join(links)
    environ["UV_NO_WRAP"] = "1"  # only the last line of a failure is shown
    progress(f"creating {path}")
    run(
        [program, "venv", "--quiet", "--no-project", "--python", python or sys.executable, str(path)], environ, progress
    )
    install = [program, "pip", "install", "--python", str(path / "bin" / "python"), "--compile-bytecode"]
    locks = [word for lock in recipe.locks(device) for word in ("--requirement", str(lock))]
    _install_packages([*install, "--require-hashes", "--no-deps", *locks], environ, progress, path.parent, device)
    if recipe.torch is not None and device is not None and recipe.torch_lock not in recipe.locks(device):
        run([*install, *_torch_requirements(recipe.torch, device, links, version_of(path))], environ, progress)
    if build is not None:
        progress(f"compiling {', '.join(pinned(recipe.build_lock))} for {device}: ten minutes to an hour")
        # Compiled anew each time: uv's cache doesn't tell builds with other options apart. Build tools come as wheels.
        sources = [word for name in sorted(pinned(recipe.build_lock)) for word in ("--no-binary", name)]
        anew = ["--require-hashes", "--no-deps", "--no-cache", *sources]
        temporary = path / "building"  # so that unfinished files are removed with the environment
        temporary.mkdir()
        building = compiling.environment(build, temporary, environ)
        _install_packages(
            [*install, *anew, "--requirement", str(recipe.build_lock)], building, progress, path.parent, device
        )
        shutil.rmtree(temporary)
        run([str(path / "bin" / "python"), "-I", "-c", f"import {build.module}"], environ, progress)
        if build.program is not None:
            link = path / "bin" / Path(build.program).name
            link.symlink_to(site_packages(path) / build.module / build.program)
            run([str(link), "--version"], environ, progress)  # proves that it finds its libraries
    _prune_and_claim(path, recipe, device)
    if package is not None:
        _unpack_program(
            path,
            recipe,
            package,
            lambda lock: run(
                [*install, "--require-hashes", "--no-deps", "--requirement", str(lock)], environ, progress
            ),
            progress,
        )


def libraries(path: Path) -> dict[str, object]:
    """The folders of the libraries from an environment's archive, for its record."""
    folders = [path / UNPACKED, *sorted({file.parent for file in site_packages(path).glob("nvidia/**/lib*.so.*")})]
    return {"library_path": [str(folder) for folder in folders]}


def _unpack_program(
    path: Path, recipe: Recipe, package: Package, add: Callable[[Path], None], progress: Progress
) -> None:
    """Unpack the archive's program, with the libraries of its kind from the package index, else from the release."""
    assert recipe.archives is not None
    folder = path / UNPACKED
    try:
        archive = package.archive()
        progress(f"unpacking {archive.name}")
        unpack(archive, folder)
        if (lock := recipe.archive_lock(package.kind)) is not None:
            try:
                add(lock)
            except InstallError:
                if package.libraries is None:
                    raise
                progress("the package index has not what it needs; taking it from the release")
                unpack(package.libraries(), folder)
    except ReleaseError as error:
        raise InstallError(str(error)) from error
    program = folder / recipe.archives.program
    if not os.access(program, os.X_OK):
        raise InstallError(f"The archive has no program {program.name}.")
    (path / "bin" / program.name).symlink_to(program)
    if lacking := list(_unmet_needs(path, folder)):
        raise InstallError(f"{package.kind} of {package.build} can't run here: {'; '.join(lacking)}")


def _unmet_needs(path: Path, folder: Path) -> Iterator[str]:
    """The needs of the unpacked files that neither the files, nor the environment, nor the system meets: libraries and glibc."""
    wanted = needs(file for file in folder.rglob("*") if file.is_file())
    there = {file.name for root in (folder, site_packages(path)) for file in root.rglob("*.so*")}
    if (have := glibc()) is None or have < wanted.glibc:
        found = "none" if have is None else f"{have[0]}.{have[1]}"
        yield f"it needs glibc {wanted.glibc[0]}.{wanted.glibc[1]} or newer, and this system has {found}"
    for name in sorted(wanted.libraries - there):
        if not name.startswith("ld-linux") and not loads(name):
            yield f"{name} is missing ({PACKAGES.get(name, 'its package may have the same name')})"


def _install_packages(
    argv: Sequence[str], environ: Mapping[str, str], progress: Progress, folder: Path, device: Device | None
) -> None:
    """As `run`. If a compiler fails, the error has only the causes, and a file in the folder the whole output."""
    log = folder / compiling.LOG
    log.unlink(missing_ok=True)
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        progress(line)

    try:
        run(argv, environ, keep)
    except InstallError as error:
        if not any(line.startswith(compiling.FAILED) for line in lines):
            raise
        with contextlib.suppress(OSError):  # the disk may be full
            log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        causes = compiling.causes(lines) or list(error.detail)
        raise InstallError(
            f"{folder.name} could not be compiled for {device or 'this machine'}: {causes[0] if causes else error}. Mend that, and say it again; all that was "
            f"said is in {log}",
            detail=tuple(causes[:LAST_LINES]),
        ) from error


def site_packages(path: Path) -> Path:
    found = sorted(path.glob("lib/python*/site-packages"))
    if not found:
        raise InstallError(f"{path} has no packages.")
    return found[0]


def version_of(path: Path) -> tuple[int, int]:
    major, minor = site_packages(path).parent.name.removeprefix("python").split(".")
    return int(major), int(minor)


def wheel_folders() -> tuple[str, ...]:
    """The folders of wheels in uv's settings, else in pip's: its variable, else its files.

    Missing folders are left out: pip skips them, but uv fails.
    """
    if named := os.environ.get("UV_FIND_LINKS"):
        return tuple(link for link in re.split(r"[,\s]+", named) if link)
    links = os.environ.get("PIP_FIND_LINKS", "").split() or _pip_links()
    places = [str(Path(link).expanduser()) if link.startswith("~") else link.removeprefix("file://") for link in links]
    return tuple(place for place in places if "://" in place or Path(place).exists())


def run(argv: Sequence[str], environ: Mapping[str, str], progress: Progress) -> None:
    """Run a program to its end, reporting each line. Raises InstallError with the last lines.

    An interruption also ends all processes that the program has started: compilers would go on for up to an hour.
    """
    lines: list[str] = []
    with (
        _ended_by_signals() as deliver,
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            encoding="utf-8",
            errors="replace",  # compilers quote sources as they are
            process_group=0,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            deliver()
            for line in process.stdout:
                if text := line.rstrip():
                    lines.append(text)
                    progress(text)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        if full := next((line for line in lines if any(word in line for word in FULL)), None):
            raise InstallError(
                f"The disk is full. Make room on it, and say it again; nothing half done is left. {full.strip()}",
                detail=tuple(lines[-LAST_LINES:]),
            )
        raise InstallError(
            f"{Path(argv[0]).name} ended with exit code {process.returncode}: {lines[-1] if lines else 'no output'}",
            detail=tuple(lines[-LAST_LINES:]),
        )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Signals that would end this process raise in the main thread instead, but not before the yielded function is called.

    Otherwise a signal during the start of a program would leave that program behind.
    """
    came: list[int] = []
    is_open = False

    def take(number: int, _frame: object = None) -> None:
        if not is_open:
            came.append(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    def deliver() -> None:
        nonlocal is_open
        is_open = True
        if came:
            take(came[0])

    taken = {}
    if threading.current_thread() is threading.main_thread():  # other threads may not set signal handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (usual := signal.getsignal(number)) in {signal.SIG_DFL, signal.default_int_handler}:
                taken[number] = usual
                signal.signal(number, take)
    try:
        yield deliver
    finally:
        for number, usual in taken.items():
            signal.signal(number, usual)


def _pip_files() -> list[Path]:
    """Pip's files of settings, the most important first. $PIP_CONFIG_FILE replaces the user's own."""
    variable = os.environ.get
    named, home, site = (
        Path(variable("PIP_CONFIG_FILE", "")),
        Path(variable("HOME") or os.devnull),
        Path(sys.prefix, "pip.conf"),
    )
    if str(named) == os.devnull:
        return []
    own = Path(variable("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf")
    mine = [named, site] if named.is_file() else [site, own, home / ".pip" / "pip.conf"]
    shared = [Path(folder, "pip", "pip.conf") for folder in (variable("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    return [*mine, Path("/etc/pip.conf"), *shared]


def _pip_links() -> list[str]:
    links: list[str] = []
    for file in _pip_files():
        settings = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, UnicodeDecodeError):  # pip reports this
            settings.read(file)
        for section in settings.sections():
            links += (settings[section].get("find-links") or settings[section].get("find_links") or "").split()
    return links


def _torch_requirements(version: str, device: Device, links: Sequence[str], python: tuple[int, int]) -> list[str]:
    """The requirements for torch's build of this device."""
    named = torch_backend(device)
    if named is None and (local := local_torch(version, device, links, python)) is not None:
        folders = [word for link in links for word in ("--find-links", link)]
        return [f"torch=={local}", *folders]
    # uv detects the version of ROCm itself.
    return [f"torch=={version}", "--torch-backend", named or ("auto" if device == "rocm" else device)]


def _prune_and_claim(path: Path, recipe: Recipe, device: Device | None) -> None:
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
