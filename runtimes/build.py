"""How a runtime's environment gets its program when the package index has no build for a kind of device.

llmux compiles the program on this machine (`Build`), or takes an archive of the project's releases (`Archives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtimes.machine import Choice, Machine


@dataclass(frozen=True, slots=True)
class Build:
    """How to compile the package in `requirements-build.lock` for one kind of device, on the machine that will run it.

    `module`: the package, imported once after the build as a check. `program`: a program in the package's folder, if it has
    one; it gets a link in the environment's bin. `options`: CMake options. `needs`: required programs, each with the package
    that contains it. `toolkit`: the key in `needs` of the toolkit's program, which has the libraries to load later beside its folder.
    """

    module: str
    program: str | None
    options: str
    needs: Mapping[str, str]
    toolkit: str | None = None


@dataclass(frozen=True, slots=True)
class Archives:
    """A project's releases for Linux. `pins`: a JSON file with the repository, the build to take, and the files' digests.

    `choose`: the kinds that suit a machine. `name`: the file of a build and kind for a processor (in uname's words), and the
    file of the libraries that this kind needs besides; None: it needs none. `program`: a file in the archive. `device`: the
    device of a kind: cuda, vulkan, rocm.
    """

    pins: Path
    program: str
    choose: Callable[[Machine], Choice]
    name: Callable[[str, str, str], tuple[str, str | None]]
    device: Callable[[str], str]
