"""How a runtime's environment gets its program, where the package index has no build for a kind of device.

It is compiled on this machine (`Build`), or is an archive of its project's own releases (`Archives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtimes.machine import Choice, Machine


@dataclass(frozen=True, slots=True)
class Build:
    """How the package in `requirements-build.lock` is compiled for one kind of device, on the machine that it is for.

    `module` is that package, imported once when it is there; `program`, if it has one, stands in its folder, and gets a link
    in the environment's bin. `options` are CMake's. `needs`: programs that must be there, each with what it comes with.
    `toolkit` is the one of them beside whose folder lie the libraries that are loaded later.
    """

    module: str
    program: str | None
    options: str
    needs: Mapping[str, str]
    toolkit: str | None = None


@dataclass(frozen=True, slots=True)
class Archives:
    """A project's releases for Linux. `pins` is a JSON file: the repository, the build that is taken, its files' digests.

    `choose` says which kinds suit a machine. `name` gives the file of a build and kind for a processor (as uname says it), and
    that of the libraries that this kind needs beside it, None where it needs none. `program` is a file in it, `device` what
    kinds compute on: cuda, vulkan, rocm.
    """

    pins: Path
    program: str
    choose: Callable[[Machine], Choice]
    name: Callable[[str, str, str], tuple[str, str | None]]
    device: Callable[[str], str]
