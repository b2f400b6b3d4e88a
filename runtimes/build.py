"""What is compiled for a runtime's environment, where the package index has no build for a kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
