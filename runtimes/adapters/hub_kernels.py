"""Kernels: compiled GPU code that comes from repositories of the hub, not from a package.

A worker never asks the hub. `llmux pull` downloads what a model's worker will load into one folder beside the environments,
and KERNELS_CACHE points the package `kernels` to it:

    <runtimes_dir>/.kernels/kernels--<owner>--<name>/refs/v<version>                    the commit, once all of it is there
                                                     snapshots/<commit>/build/<variant>/…

A repository has a folder for each build variant: torch version, CUDA version, machine. `suits` says which of them an
environment can load, by the rules of the package `kernels`, which then takes the best of those.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "KERNELS_CACHE"
FOLDER: Final = ".kernels"

Version = tuple[int, int]

_TORCH: Final = re.compile(r"torch===?(\d+)\.(\d+)\.\S*?(?:\+cu(\d+)(\d))?$")
_CUDA: Final = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?==(\d+)\.(\d+)")
_VARIANT: Final = re.compile(
    r"torch(?P<stable>-stable-abi)?(?P<major>\d)(?P<minor>\d+)(?P<abi>-cxx\d+)?"
    r"-cu(?P<cuda_major>\d+)(?P<cuda_minor>\d)-(?P<machine>\w+)-linux"
)


@dataclass(frozen=True, slots=True)
class Build:
    """The facts that decide which variants an environment can load. None: unknown."""

    torch: Version | None
    cuda: Version | None
    machine: str


def build_of(packages: Iterable[str]) -> Build:
    """The build of an environment with these packages, each `name==version`, on this machine."""
    torch: Version | None = None
    cuda: Version | None = None
    tag: Version | None = None
    for package in packages:
        if found := _TORCH.match(package):
            torch = int(found[1]), int(found[2])
            tag = (int(found[3]), int(found[4])) if found[3] else None
        elif found := _CUDA.match(package.replace("_", "-")):
            cuda = int(found[1]), int(found[2])
    cuda = tag or cuda
    return Build(
        torch if cuda is not None else None, cuda, platform.machine()
    )  # torch for CPUs loads no variant in particular


def suits(variant: str, build: Build) -> bool:
    """Whether an environment of this build can load this variant on an NVIDIA GPU."""
    if variant in ("torch-cuda", "torch-universal"):  # Python and Triton, for every version
        return True
    found = _VARIANT.fullmatch(variant)
    if found is None or found["machine"] != build.machine or found["abi"] == "-cxx98":
        return False
    torch = int(found["major"]), int(found["minor"])
    cuda = int(found["cuda_major"]), int(found["cuda_minor"])
    if build.torch is not None and (torch > build.torch if found["stable"] else torch != build.torch):
        return False
    return build.cuda is None or (cuda[0] == build.cuda[0] and cuda[1] <= build.cuda[1])


def cache(runtimes_dir: Path, env: Mapping[str, str]) -> Path:
    """The folder where a worker with this configured `env` looks for kernels."""
    return Path(env.get(VARIABLE) or runtimes_dir / FOLDER)
