"""Compiling a runtime's program on the machine that runs it: its requirements, the compilers' settings, and their errors.

A build takes up to an hour, so its requirements are checked first. CMake reads CMAKE_ARGS (the build's options,
and those of the user), CMAKE_BUILD_PARALLEL_LEVEL and LDFLAGS: the program searches the toolkit's folder for its libraries,
because the system's loader often doesn't know that folder. Only the output's lines with a cause are shown; the whole output
is kept in a file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from runtimes.build import Build
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import DriverUnavailableError
from supervisor.host.memory.nvml import NvmlSession

LOG: Final = "failed.log"
NVCC: Final = "nvcc"
ASK_S: Final = 60.0
BELOW: Final = 3  # lines
JOBS: Final = "CMAKE_BUILD_PARALLEL_LEVEL"
JOB_BYTES: Final = 2 << 30

_CAUSE: Final = re.compile(
    r"CMake Error|(?<!\w)error:|fatal error|nvcc fatal|No space left on device|undefined reference"
)
FAILED: Final = "error: Failed to build"  # uv's words before all that the compilers said
_RELEASE: Final = re.compile(r"release (\d+)\.(\d+)")


def problem(name: str, device: str | None, build: Build) -> str | None:
    """The tools that this machine lacks for a build, and the remedy; None: no problem is known before the build. Blocks for a second."""
    missing = {program: source for program, source in build.needs.items() if shutil.which(program) is None}
    if missing:
        listed = ", ".join(f"{program} ({source})" for program, source in missing.items())
        return (
            f"{name} for {device} is compiled on this machine, and these are not on PATH: {listed}. Install them, or add "
            "their folder to PATH, and say it again."
        )
    return _cuda_problem(name) if build.toolkit == NVCC else None


def _cuda_problem(name: str) -> str | None:
    """The problem of a missing GPU, or of a toolkit that is too new for the driver."""
    try:
        session = NvmlSession()
        reasons = [gpu.unusable for gpu in session.find()]
    except DriverUnavailableError as error:
        reasons = [str(error)]
    if None not in reasons:
        return (
            f"{name} for cuda is compiled for the GPU in this machine, and none can be used: "
            f"{reasons[0] if reasons else 'the driver shows none'}. Install NVIDIA's driver; give a container its devices."
        )
    driver, toolkit = session.cuda(), toolkit_version()
    if driver is None or toolkit is None or toolkit[0] <= driver[0]:
        return None
    return (
        f"nvcc is of CUDA {toolkit[0]}.{toolkit[1]}, and the driver {session.driver} is for CUDA {driver[0]}.{driver[1]}: what is "
        f"compiled would find no GPU. Update the driver, or put an nvcc of CUDA {driver[0]} first on PATH."
    )


def toolkit_version() -> tuple[int, int] | None:
    """The CUDA version of the nvcc on PATH; None where it is unknown."""
    try:
        done = subprocess.run(
            [NVCC, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _RELEASE.search(done.stdout)
    return (int(found[1]), int(found[2])) if found is not None else None


def environment(build: Build, temporary: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a build whose files lie in `temporary`. The user's own settings are kept."""
    return {
        **environ,
        JOBS: environ.get(JOBS) or str(jobs()),
        "CMAKE_ARGS": " ".join(filter(None, (build.options, environ.get("CMAKE_ARGS")))),
        "LDFLAGS": " ".join(filter(None, (*_library_paths(build), environ.get("LDFLAGS")))),
        "TMPDIR": str(temporary),
    }


def jobs() -> int:
    """The number of compilers to run at once: one a processor, if there is memory for each one's largest file. Blocks."""
    return max(1, min(len(os.sched_getaffinity(0)), HostMemory().available_bytes() // JOB_BYTES))


def _library_paths(build: Build) -> list[str]:
    program = shutil.which(build.toolkit) if build.toolkit is not None else None
    if program is None:
        return []
    place = Path(program).resolve().parents[1]
    folders = (
        [place / name for name in ("lib64", "lib")] if place != Path("/usr") else []
    )  # the loader searches /usr itself
    return [f"-Wl,-rpath,{folder}" for folder in folders if folder.is_dir()]


def causes(lines: Sequence[str]) -> list[str]:
    """The lines that state why a build failed, each with the lines indented below it, where CMake has its explanation."""
    found = []
    for at, line in enumerate(lines):
        if _CAUSE.search(line) is not None and not line.startswith(FAILED):
            found.append(" ".join((line.strip(), *_indented_below(lines[at : at + 1 + BELOW]))))
    return found


def _indented_below(lines: Sequence[str]) -> list[str]:
    """The lines after the first, up to one that is not indented further than it."""
    first, *others = (len(line) - len(line.lstrip()) for line in lines)
    return [line.strip() for line, _ in takewhile(lambda pair: pair[1] > first, zip(lines[1:], others, strict=True))]
