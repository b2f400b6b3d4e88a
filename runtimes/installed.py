"""The record in a runtime's environment: the build of its program, and the devices that the program computes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

RECORD: Final = "llmux.json"
"""A file in the environment's folder, written at the end of an installation."""


@dataclass(frozen=True, slots=True)
class Program:
    """The installed program. `device`: the kind that it was built for (cpu, cuda, rocm, vulkan); None: no difference.

    The rest describes an archive of a project's release: `build` (b11146), `kind` (cuda-13.4), the folders of its libraries,
    the variables that it needs on this machine, and its name for each GPU, by address on the PCI bus.
    """

    device: str | None = None
    build: str | None = None
    kind: str | None = None
    library_path: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def program(environment: Path) -> Program | None:
    """The program of the environment in this folder; None: no record. Blocks on a small file, once for each of its versions."""
    path = environment / RECORD
    try:
        return _read_record(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=64)
def _read_record(path: Path, _version: int) -> Program:
    record = json.loads(path.read_text(encoding="utf-8"))
    return Program(
        record["device"],
        record.get("build"),
        record.get("kind"),
        tuple(record.get("library_path", ())),
        dict(record.get("variables", {})),
        dict(record.get("names", {})),
    )
