"""What an environment's record says of the program in it: which build it is, and on what it computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

RECORD: Final = "llmux.json"
"""In an environment's folder; written last."""


@dataclass(frozen=True, slots=True)
class Program:
    """`device` is what it was made for: cpu, cuda, rocm, vulkan; None where that makes no difference.

    The rest is of an archive of its project's release: `build` (b11146), `kind` (cuda-13.4), where its libraries lie, what
    variables it needs here, and what it calls each GPU, by the address on the PCI bus.
    """

    device: str | None = None
    build: str | None = None
    kind: str | None = None
    library_path: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def program(environment: Path) -> Program | None:
    """Of the environment in this folder; None: there is none. Blocks on a small file, once for each of its versions."""
    path = environment / RECORD
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=64)
def _read(path: Path, _version: int) -> Program:
    told = json.loads(path.read_text(encoding="utf-8"))
    return Program(
        told["device"],
        told.get("build"),
        told.get("kind"),
        tuple(told.get("library_path", ())),
        dict(told.get("variables", {})),
        dict(told.get("names", {})),
    )
